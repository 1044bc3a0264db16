"""Models of many families train the same compiled and eagerly, although kernels differ from what was captured."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ftrain as ft
from ftrain.transforms.compile.capture import capture
from tests.exhaustive import choose, exhaustive
from tests.laws.transformers_families import FAMILIES, causal, of_tokens, t5


class Recurrent(nn.Module):
    def __init__(self, layer="LSTM", **options):
        super().__init__()
        self.inner = getattr(nn, layer)(8, 16, batch_first=True, **options)
        self.out = nn.Linear(16 * (1 + options.get("bidirectional", False)), 1)

    def forward(self, x):
        return self.out(self.inner(x)[0])


class NormOfTransposed(nn.Module):
    def __init__(self, norm, after=None):
        super().__init__()
        self.norm, self.after, self.out = norm, after or nn.Identity(), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.after(self.norm(x.transpose(1, 2)).transpose(1, 2)))


class ByClass(nn.Module):
    """Returns log-probabilities (time, batch, classes), as a CTC loss takes them; their kernel has its own strides."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.out(self.inner(x)).transpose(0, 1).log_softmax(-1)


def train(step, batch, steps=3):
    state, losses = step.init(), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


def assert_trains_alike(model, batch, criterion=None, *wrappers, lowering="whole", momentum=0.0, **options):
    loss = ft.from_module(model, criterion) if criterion else ft.from_module(model)
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.05, momentum=momentum), allow_unused=True), *wrappers)
    expected, expected_losses = train(step, batch)
    compiled = ft.compiled(lowering=lowering, donate=True, **options)(step)
    actual, losses = train(compiled, batch)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    for part in ("params", "buffers", "opt_state", "slots"):
        torch.testing.assert_close(getattr(actual, part), getattr(expected, part), rtol=1e-4, atol=1e-6)
    return compiled


def squares(model, x):
    return model(x).square().mean()


PLAIN = {
    "lstm": lambda: Recurrent(),
    "lstm of two layers, both ways": lambda: Recurrent(num_layers=2, bidirectional=True),
    "gru": lambda: Recurrent("GRU"),
    "batch norm of transposed": lambda: NormOfTransposed(nn.BatchNorm1d(8)),
    "batch norm of transposed, and tanh": lambda: NormOfTransposed(nn.BatchNorm1d(8), nn.Tanh()),
    "instance norm of transposed": lambda: NormOfTransposed(nn.InstanceNorm1d(8, affine=True)),
    "log-softmax of transposed": lambda: ByClass(),
}


# One recurrent module and one BatchNorm, those with the most parts, run in `make test` with AOTAutograd too.
ALSO_AOT = [name for name in PLAIN if name not in ("lstm", "gru", "batch norm of transposed")]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "eager") for name in PLAIN),
        *((name, "aot_eager") for name in ALSO_AOT),
        *(pytest.param(name, "aot_eager", marks=pytest.mark.exhaustive) for name in PLAIN if name not in ALSO_AOT),
    ],
)
def test_modules_whose_kernels_differ_from_what_was_captured(name, backend):
    torch.manual_seed(0)
    assert_trains_alike(PLAIN[name](), torch.randn(4, 5, 8), squares, backend=backend)


@torch.library.custom_op("ftrain_tests::by_columns", mutates_args=())
def by_columns(x: torch.Tensor) -> torch.Tensor:
    """Return the double, stored column by column; its fake kernel claims row by row."""
    return (2 * x).mT.contiguous().mT


by_columns.register_fake(torch.empty_like)
by_columns.register_autograd(lambda ctx, grad: 2 * grad)


def test_a_kernel_with_another_layout_than_its_fake_tensor_is_reshaped_and_not_viewed():
    def criterion(model, x):
        return by_columns(model(x)).reshape(-1)[:7].square().mean()

    assert_trains_alike(nn.Linear(8, 4), torch.randn(5, 8), criterion, backend="eager")


def determinants(matrices, x):
    # Eagerly the sum has the strides of its first term; fused by Inductor it has those of the second.
    first, second = (pair[0].mT + pair[1] * x.mean() for pair in matrices)
    return (torch.linalg.det(first).sum() + torch.linalg.slogdet(second).logabsdet.sum()) / 100


def of_experts(experts, x):
    """Return a loss with grouped products of both kinds, forward and transposed; the first expert has no rows."""
    first, second = experts
    ends = torch.tensor([0, 3, 4], dtype=torch.int32)
    hidden = F.grouped_mm(first * x.mean(), second.mT, offs=ends)
    return hidden.square().mean() + F.grouped_mm(hidden.T, hidden, offs=ends).square().mean()


def padded(images, x):
    """Return a loss of padded channels-last images; weights make it depend on where each value is."""
    total = 0.0
    for image in images:
        wide = F.pad(image.movedim(-1, 1), (1, 1) * (image.ndim - 2), "replicate")
        weights = torch.arange(1.0, wide.numel() + 1).view_as(wide)
        total = total + (wide.square() * weights).mean()
    return total * x.mean()


@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")
@pytest.mark.parametrize("axes", [(2,), *exhaustive([(1, 2, 3)])], ids=str)
def test_inductor_gives_kernels_the_memory_layouts_that_they_expect(axes):
    """An LSTM, determinants, products of experts, a resize by a scale that rounds, and padding of channels-last.

    A stack of wrappers is around them: Inductor compiles the whole step.
    """
    torch.manual_seed(0)
    parts = {
        "recurrent": (Recurrent(), squares, torch.randn(4, 5, 8)),
        "matrices": (
            nn.ParameterList([torch.randn(2, 3, 4, 4, dtype=torch.float64) for _ in range(2)]),
            determinants,
            torch.ones(4),
        ),
        "experts": (nn.ParameterList([torch.randn(4, 4), torch.randn(3, 4, 4)]), of_experts, torch.ones(4)),
        "resized": (
            nn.Sequential(nn.Conv2d(2, 3, 1), nn.Upsample(scale_factor=1.7), nn.Conv2d(3, 1, 3, bias=False)),
            squares,
            torch.randn(4, 2, 5, 6),
        ),
        "padded": (
            nn.ParameterList([torch.randn(2, *(4, 5, 6)[-count:], 3) for count in axes]),
            padded,
            torch.ones(4),
        ),
    }

    def total(model, batch):
        return sum(part_loss(model[name], batch[name]) for name, (_, part_loss, _) in parts.items())

    model = nn.ModuleDict({name: part for name, (part, _, _) in parts.items()})
    batch = {name: part_batch for name, (_, _, part_batch) in parts.items()}
    assert_trains_alike(model, batch, total, ft.clip(0.05), ft.ema(0.8), momentum=0.9)


def test_a_view_that_is_written_to_stays_a_view():
    """A view of a tensor that nothing writes to is captured as a reshape, for a kernel may return other strides."""

    def function(x):
        y = x * 2
        y.view(-1).add_(1)
        return [y.view(2, 3) * 3, x.view(3, 2) * 1]

    x = torch.arange(6.0).reshape(2, 3)
    captured = capture(function, [x], lambda: None)
    targets = [str(node.target) for node in captured.graph.nodes]
    assert [targets.count(f"aten.{name}.default") for name in ("view", "reshape")] == [2, 1]
    torch.testing.assert_close(captured(x), function(x))


def test_remat_turns_off_a_cache_that_would_be_filled_twice(caplog):
    torch.manual_seed(0)
    model = causal("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1)
    has_cache = []
    model.model.register_forward_hook(lambda module, args, output: has_cache.append(output.past_key_values is not None))
    plain = ft.train_step(ft.from_module(model), ft.optim.sgd(0.1))
    step, batch = ft.remat()(plain), of_tokens()
    expected, _ = plain(plain.init(), batch)
    state, _ = step(step.init(), batch)
    torch.testing.assert_close(state.params, expected.params, rtol=0, atol=0)
    step(state, batch)
    assert has_cache == [True, False, False]
    assert model.config.use_cache is True
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ftrain"]
    assert line.startswith("remat: LlamaForCausalLM runs without its cache of keys and values (use_cache=False)")
    again = ft.remat()(plain)
    again(again.init(), batch)
    assert len([record for record in caplog.records if record.name == "ftrain"]) == 1


FAST = ["gpt2", "resnet", "mamba", "qwen3 moe"]
"""A model with attention, one with convolutions, a state-space model and one with experts."""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo (detected a call|does not know):UserWarning")
@pytest.mark.parametrize("name", choose(FAMILIES, FAST))
def test_models_of_transformers_train_compiled(name):
    torch.manual_seed(0)
    make_model, make_batch, lowering = FAMILIES[name]
    # With Inductor's decompositions, results have other strides than those that were captured.
    backend = "aot_eager_decomp_partition" if lowering == "whole" else "eager"
    step = assert_trains_alike(make_model(), make_batch(), backend=backend, lowering="auto")
    assert f"compiled({lowering}, " in repr(step)


@pytest.mark.exhaustive
def test_inductor_compiles_a_model_of_transformers_whole():
    torch.manual_seed(0)
    assert_trains_alike(t5(), of_tokens())


@pytest.mark.parametrize("wrapper", [ft.remat(), *exhaustive([ft.accumulate(2)])], ids=lambda wrapper: wrapper.name)
def test_a_compiled_model_of_transformers_trains_alike_with_wrappers(wrapper):
    torch.manual_seed(0)
    model = causal("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1)
    assert_trains_alike(model, of_tokens(), None, wrapper, backend="eager")
