"""`with_amp` and experts of transformers: their products are in the dtype of autocast, and their gradients are wide."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain.transforms.amp import wrapper
from ftrain.transforms.amp.experts import with_narrow_experts
from tests.parallel.ranks import run, seeded

transformers = pytest.importorskip("transformers", minversion="5.3")
CLASSES = {
    "Mixtral": transformers.models.mixtral.modeling_mixtral.MixtralExperts,
    "GptOss": transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts,
}
model_types = pytest.mark.parametrize("model_type", CLASSES)

BF16 = 2.0**-8
"""The relative error of a number that is rounded to bfloat16."""

HIDDEN, EXPERTS, TOKENS, EXPERTS_OF_TOKEN = 8, 4, 10, 2


class Layer(nn.Module):
    """The experts of a layer of transformers, with random parameters."""

    def __init__(self, model_type, size=16):
        super().__init__()
        make_config = getattr(transformers, f"{model_type}Config")
        config = make_config(hidden_size=HIDDEN, num_local_experts=EXPERTS, intermediate_size=size)
        config._experts_implementation = "grouped_mm"
        with torch.no_grad(), seeded(0):
            self.experts = CLASSES[model_type](config)
            for param in self.parameters():
                param.normal_()

    def forward(self, batch):
        return self.experts(batch["x"], batch["indices"], batch["weights"])


class TwoLayers(nn.Module):
    """Two layers, which are blocks of `remat`."""

    def __init__(self, model_type="Mixtral"):
        super().__init__()
        self.layers = nn.ModuleList(Layer(model_type) for _ in range(2))

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = x + layer({**batch, "x": x}) / 8
        return x


def make_batch(seed=1):
    """Return tokens with random experts, of which the last gets no token."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS - 1, generator=generator)
    weights, indices = scores.topk(EXPERTS_OF_TOKEN)
    return {"x": torch.randn(TOKENS, HIDDEN, generator=generator), "indices": indices, "weights": weights}


def make_step(model, *wrappers, lr=1.0):
    loss_fn = ft.from_module(model, lambda model, batch: model(batch).float().square().mean())
    return ft.compose(ft.train_step(loss_fn, ft.optim.sgd(lr)), *wrappers)


def gradients_of(model, *wrappers):
    """Return the difference that a step at the rate 1 makes."""
    step = make_step(model, *wrappers)
    state = step.init()
    after, _ = step(state, make_batch())
    return ft.tree.map(torch.sub, state.params, after.params)


def assert_near_in_bf16(actual, expected):
    """Check that gradients are equal within the rounding of the largest element."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    torch.testing.assert_close(actual, expected, rtol=BF16, atol=BF16 * largest)


class RecordProducts(TorchDispatchMode):
    """Context that records the dtypes of the products of experts."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def mixtral_by_hand(layer, x, indices, weights):
    """Return the output of Mixtral's experts, computed one by one in bfloat16."""
    output = torch.zeros_like(x)
    narrow = {name: param.bfloat16() for name, param in layer.experts.named_parameters()}
    for expert, (gate_up, down) in enumerate(zip(narrow["gate_up_proj"], narrow["down_proj"], strict=True)):
        tokens, choice = torch.where(indices == expert)
        gate, up = (x[tokens].bfloat16() @ gate_up.T).chunk(2, dim=-1)
        products = (nn.functional.silu(gate) * up) @ down.T
        output = output.index_add(0, tokens, products * weights[tokens, choice, None])
    return output


def test_experts_equal_those_by_hand_in_bfloat16():
    layer = Layer("Mixtral")
    actual = gradients_of(layer, ft.with_amp("bf16"))
    params = dict(layer.named_parameters())
    loss = mixtral_by_hand(layer, **make_batch()).square().mean()
    expected = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        assert not gradient[-1].any(), "the gradient of an expert without a token"
        assert_near_in_bf16({name: gradient}, {name: expected[name]})


@model_types
def test_recomputed_experts_have_the_same_bits(model_type):
    model = TwoLayers(model_type)
    with RecordProducts() as products:
        recomputed = gradients_of(model, ft.with_amp("bf16"), ft.remat())
    assert set(products.dtypes) == {torch.bfloat16}
    torch.testing.assert_close(recomputed, gradients_of(model, ft.with_amp("bf16")), rtol=0, atol=0)


@model_types
def test_microbatches_of_experts_add_up_to_the_batch(model_type):
    model = TwoLayers(model_type)
    with RecordProducts() as products:
        accumulated = gradients_of(model, ft.with_amp("bf16"), ft.accumulate(2))
    assert set(products.dtypes) == {torch.bfloat16}
    assert_near_in_bf16(accumulated, gradients_of(model, ft.with_amp("bf16")))


@pytest.mark.parametrize("level", [2, 3])
def test_experts_on_two_ranks(level):
    def gradients_on_rank(_):
        step = make_step(TwoLayers(), ft.with_amp("bf16"), ft.sharded(ft.parallel.mesh(), level))
        state = step.init()
        with RecordProducts() as products:
            after, _ = step(state, make_batch())
        assert set(products.dtypes) == {torch.bfloat16}
        return ft.tree.map(torch.sub, ft.parallel.whole(state).params, ft.parallel.whole(after).params)

    expected = gradients_of(TwoLayers(), ft.with_amp("bf16"))
    for gradients in run(2, gradients_on_rank):
        assert_near_in_bf16(gradients, expected)


def test_a_whole_graph_multiplies_experts_in_bfloat16():
    eager = make_step(TwoLayers(), ft.with_amp("bf16"), lr=0.1)
    compiled = ft.compiled(lowering="whole", backend="aot_eager")(eager)
    state, _ = compiled(compiled.init(), make_batch())
    with RecordProducts() as products:
        state, _ = compiled(state, make_batch(2))
    assert set(products.dtypes) == {torch.bfloat16}
    expected, _ = eager(eager.init(), make_batch())
    expected, _ = eager(expected, make_batch(2))
    torch.testing.assert_close(state.params, expected.params, rtol=BF16, atol=BF16)


def loss_and_narrow_params(layer, batch):
    """Return a loss, and as metrics which parameters are in bfloat16 while the experts run."""
    is_narrow, apply_gate = {}, layer.experts._apply_gate

    def apply_gate_recording(product):
        for name, param in layer.experts.named_parameters():
            is_narrow[f"experts.{name}"] = torch.tensor(float(param.dtype == torch.bfloat16))
        return apply_gate(product)

    layer.experts._apply_gate = apply_gate_recording
    loss = layer(batch).float().square().mean()
    del layer.experts._apply_gate
    return loss, is_narrow


@pytest.mark.parametrize(
    ("model_type", "implementation", "size", "is_cast"),
    [
        ("Mixtral", "grouped_mm", 16, True),
        ("GptOss", "grouped_mm", 16, True),
        # Rows of 12 numbers of 16 bits are not aligned.
        ("Mixtral", "grouped_mm", 12, False),
        # Autocast itself casts for the functions that these call.
        ("GptOss", "eager", 16, False),
        ("Mixtral", "batched_mm", 16, False),
    ],
)
def test_matrices_are_cast_where_torch_multiplies_groups_in_16_bits(model_type, implementation, size, is_cast):
    layer = Layer(model_type, size)
    step = ft.train_step(ft.from_module(layer, loss_and_narrow_params), ft.optim.sgd(1.0))
    step = ft.with_amp("bf16")(step)
    layer.experts.config._experts_implementation = implementation
    _, metrics = step(step.init(), make_batch())
    is_narrow = {name: bool(value) for name, value in metrics.items() if name.startswith("experts")}
    params = dict(layer.named_parameters())
    assert is_narrow == {name: is_cast and not name.endswith("bias") for name in params}
    assert {param.dtype for param in params.values()} == {torch.float32}


def test_auto_is_bf16_for_experts_too(monkeypatch):
    monkeypatch.setattr(wrapper, "auto_dtype", lambda backend: "bf16")
    expected = gradients_of(Layer("Mixtral"), ft.with_amp("bf16"))
    torch.testing.assert_close(gradients_of(Layer("Mixtral"), ft.with_amp("auto")), expected, rtol=0, atol=0)


def test_a_loss_without_experts_stays_as_it_is():
    loss_fn = ft.from_module(nn.Linear(2, 1), lambda model, batch: model(batch).mean())
    assert with_narrow_experts(loss_fn) is loss_fn


def test_experts_without_autocast_multiply_in_float32():
    with RecordProducts() as products:
        gradients_of(Layer("Mixtral"))
    assert set(products.dtypes) == {torch.float32}
