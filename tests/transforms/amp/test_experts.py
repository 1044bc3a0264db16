"""`with_amp` and experts of transformers: their products are in the dtype of autocast, and their gradients are wide."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain.transforms.amp import wrapper
from ftrain.transforms.amp.experts import with_narrow_experts
from tests.parallel import models
from tests.parallel.ranks import run

transformers = pytest.importorskip("transformers", minversion="5.3")
BF16 = 2.0**-8
"""The rounding of a number to bfloat16."""

SIZES = {"hidden_size": 8, "num_local_experts": 4}
TOKENS, CHOSEN = 10, 2


class Layer(nn.Module):
    """Experts that get random tokens; the last one gets none."""

    def __init__(self, kind, size=16):
        super().__init__()
        config = getattr(transformers, f"{kind}Config")(**SIZES, intermediate_size=size)
        config._experts_implementation = "grouped_mm"
        module = {"Mixtral": transformers.models.mixtral.modeling_mixtral.MixtralExperts}
        module["GptOss"] = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts
        with torch.no_grad(), models._seeding, torch.random.fork_rng():
            torch.manual_seed(0)
            self.experts = module[kind](config)
            for param in self.parameters():
                param.normal_()

    def forward(self, batch):
        return self.experts(batch["x"], batch["chosen"], batch["weights"])


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, SIZES["num_local_experts"] - 1, generator=generator)
    weights, chosen = scores.topk(CHOSEN)
    return {"x": torch.randn(TOKENS, 8, generator=generator), "chosen": chosen, "weights": weights}


def gradients(layer, *wrappers, data=None):
    loss = ft.from_module(layer, lambda layer, batch: layer(batch).float().square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *wrappers)
    state = step.init()
    new, _ = step(state, data or batch())
    return ft.tree.map(torch.sub, state.params, new.params)


class Products(TorchDispatchMode):
    """Records the dtypes of the products of experts."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def by_hand(layer, x, chosen, weights):
    """Mixtral's experts, one by one, in bfloat16."""
    result = torch.zeros_like(x)
    narrow = {name: param.bfloat16() for name, param in layer.experts.named_parameters()}
    for expert, (first, second) in enumerate(zip(narrow["gate_up_proj"], narrow["down_proj"], strict=True)):
        tokens, place = torch.where(chosen == expert)
        gate, up = (x[tokens].bfloat16() @ first.T).chunk(2, dim=-1)
        products = (nn.functional.silu(gate) * up) @ second.T
        result = result.index_add(0, tokens, products * weights[tokens, place, None])
    return result


def test_experts_equal_those_by_hand_in_bfloat16():
    layer = Layer("Mixtral")
    grads = gradients(layer, ft.with_amp("bf16"))
    params = list(layer.parameters())
    expected = torch.autograd.grad(by_hand(layer, **batch()).square().mean(), params)
    for grad, want, param in zip(grads.values(), expected, params, strict=True):
        assert grad.dtype == param.dtype == torch.float32
        assert not grad[-1].any(), "the gradient of an expert without a token"
        torch.testing.assert_close(grad, want, rtol=BF16, atol=BF16 * float(want.abs().max()))


class Two(nn.Module):
    """Two layers, which are blocks."""

    def __init__(self, kind="Mixtral"):
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = x + layer({**batch, "x": x}) / 8
        return x


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_recomputed_experts_have_the_same_bits_and_microbatches_their_sum(kind):
    layer = Two(kind)
    with Products() as products:
        grads = gradients(layer, ft.with_amp("bf16"))
        recomputed = gradients(layer, ft.with_amp("bf16"), ft.remat())
        summed = gradients(layer, ft.with_amp("bf16"), ft.accumulate(2))
    assert set(products.dtypes) == {torch.bfloat16}
    torch.testing.assert_close(recomputed, grads, rtol=0, atol=0)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    torch.testing.assert_close(summed, grads, rtol=BF16, atol=BF16 * largest)


@pytest.mark.parametrize("level", [2, 3])
def test_experts_on_two_ranks(level):
    def rank(_):
        return gradients_of_ranks(level)

    expected = gradients(Two(), ft.with_amp("bf16"))
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for grads in run(2, rank):
        torch.testing.assert_close(grads, expected, rtol=BF16, atol=BF16 * largest)


def gradients_of_ranks(level):
    loss = ft.from_module(Two(), lambda layer, batch: layer(batch).float().square().mean())
    step = ft.train_step(loss, ft.optim.sgd(1.0))
    step = ft.compose(step, ft.with_amp("bf16"), ft.sharded(ft.parallel.mesh(), level))
    state = step.init()
    with Products() as products:
        new, _ = step(state, batch())
    assert set(products.dtypes) == {torch.bfloat16}
    return ft.tree.map(torch.sub, ft.parallel.whole(state).params, ft.parallel.whole(new).params)


def test_a_whole_graph_multiplies_experts_in_bfloat16():
    loss = ft.from_module(Two(), lambda layer, batch: layer(batch).float().square().mean())
    eager = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.with_amp("bf16"))
    step = ft.compiled(lowering="whole", backend="aot_eager")(eager)
    state, _ = step(step.init(), batch())
    with Products() as products:
        state, _ = step(state, batch(2))
    assert set(products.dtypes) == {torch.bfloat16}
    expected, _ = eager(eager.init(), batch())
    expected, _ = eager(expected, batch(2))
    torch.testing.assert_close(state.params, expected.params, rtol=BF16, atol=BF16)


@pytest.mark.parametrize(
    ("kind", "implementation", "size"),
    [
        ("Mixtral", "grouped_mm", 16),
        ("GptOss", "grouped_mm", 16),
        ("Mixtral", "grouped_mm", 12),
        ("GptOss", "eager", 16),
        ("Mixtral", "batched_mm", 16),
    ],
)
def test_matrices_are_cast_where_torch_multiplies_groups_in_16_bits(kind, implementation, size):
    """Rows of 12 numbers of 16 bits are not aligned, and for what the other implementations call autocast casts."""
    layer = Layer(kind, size)
    step = ft.compose(ft.train_step(ft.from_module(layer, seen_dtypes), ft.optim.sgd(1.0)), ft.with_amp("bf16"))
    layer.experts.config._experts_implementation = implementation
    _, metrics = step(step.init(), batch())
    narrow = implementation == "grouped_mm" and size == 16
    seen = {name.rpartition(".")[-1]: bool(each) for name, each in metrics.items() if name.startswith("experts")}
    assert seen == {name: narrow and not name.endswith("bias") for name, _ in layer.experts.named_parameters()}
    assert all(param.dtype == torch.float32 for param in layer.parameters())


def seen_dtypes(layer, batch):
    """Report which parameters are in bfloat16 while the experts run."""
    seen, gate = {}, layer.experts._apply_gate

    def applied(product):
        seen.update(
            (f"experts.{name}", param.dtype == torch.bfloat16) for name, param in layer.experts.named_parameters()
        )
        return gate(product)

    layer.experts._apply_gate = applied
    loss = layer(batch).float().square().mean()
    del layer.experts._apply_gate
    return loss, {name: torch.tensor(float(narrow)) for name, narrow in seen.items()}


def test_auto_is_bf16_for_experts_too(monkeypatch):
    monkeypatch.setattr(wrapper, "auto_dtype", lambda backend: "bf16")
    expected = gradients(Layer("Mixtral"), ft.with_amp("bf16"))
    torch.testing.assert_close(gradients(Layer("Mixtral"), ft.with_amp("auto")), expected, rtol=0, atol=0)


def test_without_experts_or_autocast_nothing_changes():
    loss = ft.from_module(nn.Linear(2, 1), lambda model, batch: model(batch).mean())
    assert with_narrow_experts(loss) is loss
    with Products() as products:
        gradients(Layer("Mixtral"))
    assert set(products.dtypes) == {torch.float32}
