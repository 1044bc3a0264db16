"""Updates within the backward pass give the same bits as after it, and the gradients never all exist at once."""

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import optim, tree
from ftrain.errors import ComposeError, ConsumedError, LossError, TraceError
from ftrain.optim.partial_update import by_size
from ftrain.types import Optimizer
from tests.bits import assert_same_bits
from tests.exhaustive import choose
from tests.laws.models import make_batch
from tests.laws.optimizer_steps import build as build_optimizer
from tests.laws.optimizer_steps import train as train_optimizer
from tests.laws.optimizers import COMBINED, OPTIMIZERS
from tests.laws.pipelines import build, train
from tests.laws.registry import ALONE

module = importlib.import_module("ftrain.transforms.update_in_backward")
COMPATIBLE = ("bf16", "remat", "remat_dots", "ema", "swa")
STACK = ("remat", "bf16", "ema", "swa")


@pytest.fixture(autouse=True)
def leaf_by_leaf(monkeypatch, request):
    """Update each parameter as soon as it can be: by default the small ones of these models wait for each other."""
    if "together" not in request.fixturenames:
        monkeypatch.setattr(module, "by_size", lambda leaves, most: [[index] for index in range(len(leaves))])


@pytest.fixture
def together():
    """Turn `leaf_by_leaf` off: parameters are grouped as outside of tests."""


names = pytest.mark.parametrize(
    "names", [(), *((name,) for name in COMPATIBLE), STACK], ids=lambda names: "+".join(names) or "plain"
)


@names
@pytest.mark.parametrize("more", [(), (ft.donated(),)], ids=["", "donated"])
def test_no_bit_changes(names, more):
    _, plain = build(names, *more)
    _, step = build(names, ft.update_in_backward(), *more)
    assert_same_bits(train(step)[0], train(plain)[0])


@pytest.mark.parametrize("name", OPTIMIZERS | COMBINED)
@pytest.mark.parametrize("more", [(), (ft.donated(),)], ids=["", "donated"])
def test_no_bit_changes_with_any_optimizer(name, more):
    actual = train_optimizer(build_optimizer(name, ft.update_in_backward(), *more), torch.float32)
    assert_same_bits(actual, train_optimizer(build_optimizer(name, *more), torch.float32))


@pytest.mark.parametrize("donate", choose([False, True], [True]))
@pytest.mark.parametrize("backend", choose(["eager", "aot_eager"], ["eager"]))
def test_a_whole_graph_computes_the_same(donate, backend):
    compiled = ft.compiled(lowering="whole", backend=backend, donate=donate)
    names = ("remat", "bf16", "ema")
    _, plain = build(names, compiled, p=0.0)
    _, step = build(names, ft.update_in_backward(), compiled, p=0.0)
    assert_same_bits(train(step)[0], train(plain)[0])


@pytest.mark.parametrize("make", [lambda: optim.adamw_8bit(0.1), lambda: optim.partition({"all": optim.adam(0.1)}, {})])
def test_parameters_may_be_a_bare_tensor(make):
    plain = ft.train_step(lambda params, batch: (batch @ params - 1).square().mean(), make())
    step = ft.update_in_backward()(plain)
    initial, batch = torch.linspace(-1, 1, 6).reshape(3, 2), torch.linspace(0, 1, 12).reshape(4, 3)
    actual, expected = step.init(initial), plain.init(initial)
    for _ in range(2):
        (actual, _), (expected, _) = step(actual, batch), plain(expected, batch)
    assert_same_bits(actual, expected)


def test_the_step_is_pure():
    _, step = build(("remat",), ft.update_in_backward())
    state, _ = train(step, 1)
    kept, batch = tree.clone(state), make_batch(7)
    assert_same_bits(step(state, batch), step(state, batch))
    assert_same_bits(state, kept)


def test_a_mean_of_weight_zero_gives_the_same_bits():
    states = []
    for more in ((), (ft.update_in_backward(),)):
        _, step = build((), *more)
        batch = make_batch(0)
        batch["labels"] = torch.full_like(batch["labels"], -100)
        states.append(step(step.init(), batch)[0])
    assert_same_bits(states[0], states[1])


def unused(params, batch):
    return (params["a"] * batch).sum(), {"seen": params["a"].detach()[0]}


@pytest.mark.parametrize("more", [(), (ft.donated(),)], ids=["", "donated"])
def test_parameters_that_the_loss_does_not_use_decay_if_allowed_and_are_an_error_else(more):
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    steps = [
        ft.compose(ft.train_step(unused, optim.adamw(0.1, weight_decay=0.1), allow_unused=True), *wrappers, *more)
        for wrappers in ((), (ft.update_in_backward(),))
    ]
    expected, actual = [step(step.init(params), torch.ones(3)) for step in steps]
    assert_same_bits(actual, expected)
    refusing = ft.compose(ft.train_step(unused, optim.adamw(0.1)), ft.update_in_backward(), *more)
    state = refusing.init(params)
    with pytest.raises(LossError, match="does not use 1 of 2 parameters: b"):
        refusing(state, torch.ones(3))
    if more:
        with pytest.raises(ConsumedError):
            _ = state.params
    else:
        assert_same_bits(state.params, params)


class NoneForSecond(torch.autograd.Function):
    """Returns the double of the first argument; its gradient of the second is None."""

    @staticmethod
    def forward(ctx, x, w):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def test_parameters_whose_gradient_is_none_are_unused():
    def loss(params, batch):
        return NoneForSecond.apply(params["a"] * batch, params["b"]).sum()

    params = {"a": torch.ones(3), "b": torch.ones(2)}
    plain = ft.train_step(loss, optim.adamw(0.1, weight_decay=0.1), allow_unused=True)
    step = ft.update_in_backward()(plain)
    assert_same_bits(step(step.init(params), torch.ones(3)), plain(plain.init(params), torch.ones(3)))
    step = ft.update_in_backward()(ft.train_step(loss, optim.sgd(0.1)))
    with pytest.raises(LossError, match="does not use 1 of 2 parameters: b"):
        step(step.init(params), torch.ones(3))


def test_a_donated_step_that_fails_before_its_backward_pass_consumes_nothing():
    def loss(params, batch):
        return (params["w"] @ batch).sum()

    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), ft.update_in_backward(), ft.donated())
    state = step.init({"w": torch.ones(3)})
    with pytest.raises(RuntimeError):
        step(state, torch.ones(2))
    assert_same_bits(state.params, {"w": torch.ones(3)})


# A parameter that is used detached may be updated before the backward pass needs its old value.


class ReadsOther(nn.Module):
    """A block that uses the weight of another module: detached, or in the last block with a gradient."""

    def __init__(self, other):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.other = other

    def forward(self, x, is_last):
        weight = self.other.weight if is_last else self.other.weight.detach()
        return F.linear(torch.sin(self.linear(x)), weight)


class UsesDetached(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(ReadsOther(shared) for _ in range(3))

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x, is_last=index == 2)
        return x


@pytest.mark.parametrize("wrappers", [(), (ft.remat(),), (ft.remat("dots"),)], ids=["", "remat", "dots"])
def test_a_parameter_that_is_read_after_its_update_raises_if_donated(wrappers):
    torch.manual_seed(0)
    loss = ft.from_module(UsesDetached(), lambda model, batch: model(batch).square().sum())
    plain = ft.compose(ft.train_step(loss, optim.sgd(0.1)), *wrappers)
    batch = torch.randn(2, 4)
    expected = plain(plain.init(), batch)[0].params
    step = ft.update_in_backward()(plain)
    assert_same_bits(step(step.init(), batch)[0].params, expected)
    donated = ft.donated()(step)
    state = donated.init()
    with pytest.raises((LossError, RuntimeError), match=r"modified by an inplace operation|was overwritten before"):
        donated(state, batch)
    with pytest.raises(ConsumedError):
        _ = state.params


# Memory


def gpt(width=64, layers=6):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(x)))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.blocks = nn.Embedding(128, width), nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(width, 128, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            x = self.words(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return ft.from_module(GPT(), lambda model, batch: F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()))


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(
    # With bf16 the peak is lower by less: the bfloat16 copies of the weights are half as large as the gradients, and
    # exist before these do.
    ("wrappers", "share"),
    [
        pytest.param((), 0.8, id=""),
        pytest.param((ft.with_amp("bf16"),), 0.4, id="bf16", marks=pytest.mark.exhaustive),
        pytest.param((ft.remat(), ft.ema()), 0.8, id="remat", marks=pytest.mark.exhaustive),
    ],
)
def test_the_gradients_never_all_exist(wrappers, share):
    batch = torch.randint(128, (1, 8))
    reports = []
    for more in ((), (ft.update_in_backward(),)):
        step = ft.compose(ft.train_step(gpt(width=128, layers=8), optim.adamw(1e-3)), *wrappers, *more, ft.donated())
        reports.append(ft.anatomy(step, step.init(), batch))
    plain, fused = reports
    weights = 4 * plain.params
    for report in reports:
        assert abs(report.measured / report.peak - 1) < 0.05
    assert plain.most["gradients"] > 0.99 * weights
    assert fused.most["gradients"] < 0.01 * weights
    # At any time there are the gradients of one group: one large parameter, or small ones of half a megabyte.
    assert plain.peak - fused.peak > share * weights
    assert plain.measured - fused.measured > share * weights


def test_small_leaves_are_grouped_up_to_the_size_of_a_group():
    leaves = [torch.empty(size) for size in (10, 10, module.GROUP_BYTES, 5)]
    assert by_size(leaves, module.GROUP_BYTES) == [[0, 1], [2], [3]]


# What it refuses

NEED_ALL = {
    "clip": ft.clip(1.0),
    "accumulate": ft.accumulate(2),
    "skip_nonfinite": ft.skip_nonfinite(),
    "fp16": ft.with_amp("fp16"),
    "wrapper of a user": ft.Wrapper("own", "own()", update=ft.OnUpdate(lambda update: update)),
}


@pytest.mark.parametrize(("name", "first"), list(itertools.product(NEED_ALL, (True, False))))
def test_a_wrapper_that_needs_all_gradients_is_refused(name, first):
    inner, outer = ft.update_in_backward(), NEED_ALL[name]
    if not first:
        inner, outer = outer, inner
    message = rf"update_in_backward: {NEED_ALL[name].text.split('(')[0]}.* needs all gradients at once.*leave out one"
    with pytest.raises(ComposeError, match=message):
        ft.compose(build(())[1], inner, outer)
    with pytest.raises(ComposeError, match="use bf16"):
        ft.compose(build(())[1], ft.with_amp("fp16"), ft.update_in_backward())


def test_fit_that_splits_is_refused_before_it_begins():
    _, step = build((), ft.update_in_backward())
    state = step.init()
    with pytest.raises(ComposeError, match=r"update_in_backward: .* needs all gradients at once"):
        ft.fit(step, state, [make_batch(0)], on_oom="split", progress=False)
    assert int(state.step) == 0
    actual, history = ft.fit(step, state, [make_batch(0)], progress=False)
    assert len(history["loss"]) == int(actual.step) == 1


def test_a_split_step_is_refused():
    for options in ({"lowering": "split"}, {"dynamic": True}):
        for order in (1, -1):
            wrappers = (ft.update_in_backward(), ft.compiled(backend="eager", **options))
            with pytest.raises(ComposeError, match="a split step cannot be updated within its backward pass"):
                ft.compose(build(())[1], *wrappers[::order])

    def reads_a_value(params, batch):
        return (params["w"] * batch).sum() * float(batch.sum())

    step = ft.compose(
        ft.train_step(reads_a_value, optim.sgd(0.1)), ft.update_in_backward(), ft.compiled(backend="eager")
    )
    with pytest.raises(TraceError, match=r"cannot be captured as one graph.*leave out update_in_backward or compiled"):
        step(step.init({"w": torch.ones(2)}), torch.ones(2))


def test_an_optimizer_that_needs_all_leaves_is_refused():
    homemade = Optimizer(lambda params: (), lambda *args, **kwargs: None, {}, "homemade")
    with pytest.raises(ComposeError, match="update_in_backward: homemade cannot update some parameters without"):
        ft.update_in_backward()(ft.train_step(unused, homemade))


def test_the_wrapper_prints_in_the_line_of_the_update():
    _, step = build(("ema",), ft.update_in_backward())
    assert "update  adamw(constant(0.05), weight_decay=0.1) <- ema(0.8) <- update_in_backward()" in repr(step)


def test_every_wrapper_is_refused_or_changes_no_bit():
    refused = []
    for names in ALONE[1:]:
        _, plain = build(names)
        try:
            step = ft.update_in_backward()(plain)
        except ComposeError:
            refused += names
        else:
            assert_same_bits(train(step, 1)[0], train(plain, 1)[0])
    assert set(refused) >= {"fp16", "accumulate", "clip", "clip_value", "skip"}
    assert not set(refused) & set(COMPATIBLE)
