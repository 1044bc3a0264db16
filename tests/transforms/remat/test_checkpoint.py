"""What is run again for the backward pass gives the same gradients, keeps only its arguments, and stops early."""

import functools
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from ftrain.errors import LossError, TraceError
from ftrain.transforms.remat.checkpoint import recomputed

SIZE = 4


def twice(function):
    return lambda *args, **kwargs: recomputed(function, function, args, kwargs)


def leaf(*shape):
    return torch.randn(*(shape or (SIZE, SIZE)), dtype=torch.float64, requires_grad=True)


def catching(x, w):
    """Goes on after errors of its own; that enough was computed again is none of them."""
    try:
        return torch.tanh(x @ w).sin()
    except Exception:
        return x * 0


def inside(x, w):
    """Takes a gradient itself."""
    hidden = torch.tanh(x @ w)
    (slope,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
    return hidden * slope


def nested(x, w):
    return twice(catching)(torch.sigmoid(twice(catching)(x, w)), w).exp()


def written(x, w):
    """What is given is as it was; what comes of it is not."""
    return (x @ w).sin_().mul_(2).exp()


def linear(x, w):
    """Needs nothing for its gradient."""
    return x + 2 * w


FUNCTIONS = [catching, inside, nested, written, linear]


def gradients(function, inputs, order):
    actual = [function(*inputs)]
    for _ in range(order):
        total = sum(each.sin().sum() for each in actual)
        actual = torch.autograd.grad(total, inputs, create_graph=True)
    return actual


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_every_order_are_the_same(function, order):
    inputs = leaf(), leaf()
    assert all(map(torch.equal, gradients(twice(function), inputs, order), gradients(function, inputs, order)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_second_backward_pass_runs_it_again(function):
    inputs = leaf(), leaf()
    value, expected = twice(function)(*inputs), torch.autograd.grad(function(*inputs).sum(), inputs)
    for _ in range(3):
        actual = torch.autograd.grad(value.sum(), inputs, retain_graph=True)
        assert all(map(torch.equal, actual, expected))
    for own, other in zip(inputs, expected, strict=True):
        assert torch.equal(*torch.autograd.grad(value.sum(), own, retain_graph=True), other)


class Asking(torch.autograd.Function):
    """Asks for what it has saved, and asks again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos(), x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[1].cos()) / 2


def test_who_asks_twice_for_what_is_saved_gets_it_twice():
    x, expected = leaf(), []
    for run in (Asking.apply, twice(Asking.apply)):
        expected.append(torch.autograd.grad(run(x).sum(), x)[0])
    assert torch.equal(*expected)


def test_arguments_are_what_they_were():
    seen = []

    def function(nothing, x, text, inside, *, scale, collected):
        seen.append((nothing, x, text, inside, scale, [*collected]))
        collected.append(x)
        return x * inside["w"] * scale

    x, w, collected = leaf(), leaf(), ["begun"]
    inputs = (None, x, "text", {"z": 1, "w": w})
    scale = torch.full((SIZE, SIZE), 2.0, dtype=torch.float64)
    actual = torch.autograd.grad(twice(function)(*inputs, scale=scale, collected=collected).sum(), (x, w))
    assert all(map(torch.equal, actual, (2 * w, 2 * x)))
    for first, second in zip(*seen, strict=True):
        assert ft.tree.signature(second) == ft.tree.signature(first)
    assert [*seen[1][3]] == ["z", "w"]
    assert torch.equal(seen[1][1], x)
    assert seen[1][1].requires_grad
    assert seen[1][3]["w"].requires_grad
    assert not seen[1][4].requires_grad
    assert collected == ["begun", x]


def test_it_is_run_again_once_and_no_further_than_it_must():
    ran = []

    def function(x):
        ran.append("begun")
        x = x.sin().cos()
        ran.append("nearly over")
        x = x + x.exp()
        ran.append("over")
        return x + 1

    x = leaf()
    twice(function)(x).sum().backward()
    # The last thing that is saved is what exp returns.
    assert ran == ["begun", "nearly over", "over", "begun", "nearly over"]
    ran.clear()
    with torch.no_grad():
        twice(function)(x)
    assert len(ran) == 3


@pytest.fixture
def nan_in_new_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
def test_what_an_operation_writes_after_autograd_has_saved_it_is_there():
    """RReLU writes the noise that it multiplies by when autograd has saved it."""

    def function(x):
        torch.manual_seed(0)
        return F.rrelu(x, training=True) + 1

    x = leaf()
    expected, actual = (torch.autograd.grad(run(x).sum(), x) for run in (function, twice(function)))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Probe(torch.autograd.Function):
    """Notes what it keeps, and what of that is there when its gradient is asked for."""

    kept, nodes, alive, graphs = [], [], [], []

    @staticmethod
    def forward(ctx, x):
        kept = x * 2
        ctx.save_for_backward(kept)
        Probe.kept.append(weakref.ref(kept))
        Probe.nodes.append(weakref.ref(ctx))
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        Probe.alive.append(sum(each() is not None for each in Probe.kept))
        Probe.graphs.append(sum(each() is not None for each in Probe.nodes))
        return grad * kept


@pytest.fixture
def probe():
    for each in (Probe.kept, Probe.nodes, Probe.alive, Probe.graphs):
        each.clear()
    gc.collect()
    gc.disable()
    yield Probe
    gc.enable()


def gone(references):
    return all(each() is None for each in references)


@pytest.mark.parametrize("retained", [False, True])
def test_nothing_is_held_but_the_arguments_and_nothing_after_the_backward_pass(probe, retained):
    def function(x):
        for _ in range(3):
            x = probe.apply(x).sin()
        return x

    x = leaf() * 1
    value, held = twice(function)(x), weakref.ref(x)
    assert len(probe.kept) == 3
    assert gone(probe.kept)
    del x
    value.sum().backward(retain_graph=retained)
    # Each is gone when it was used, and the second graph when all was made.
    assert probe.alive == [3, 2, 1]
    assert gone(probe.kept)
    assert probe.graphs == [3, 3, 3]
    del value
    assert held() is None


def test_what_nobody_needs_any_more_is_not_held_again(probe):
    def function(x):
        return probe.apply(x).sin(), probe.apply(x).cos().sin()

    value, other = twice(function)(leaf())
    del other
    value.sum().backward()
    assert probe.alive == [1]


def test_autocast_and_the_default_device_are_as_they_were():
    kinds = []

    def function(x, w):
        product = x @ w
        kinds.append((product.dtype, torch.empty(0).device.type))
        return product.float().exp()

    x, w = torch.randn(2, SIZE, SIZE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        inner = twice(function)(x, w)
    inner.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        # Here it is the other way round: off within, on around the backward pass.
        with torch.autocast("cpu", enabled=False):
            outer = twice(function)(x, w)
        outer.sum().backward()
    assert kinds == [(torch.bfloat16, "meta")] * 2 + [(torch.float32, "cpu")] * 2


def test_hooks_of_others_see_the_arguments_alone():
    seen = []
    x, w = leaf(), leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: seen.append(each) or each, lambda each: each):
        value = twice(catching)(x, w)
    assert len(seen) == 3
    assert torch.equal(seen[1], x)
    assert torch.equal(seen[2], w)
    value.sum().backward()


def test_arguments_that_were_written_over_are_an_error():
    x = leaf() * 1
    value = twice(catching)(x, leaf())
    x.add_(1)
    with pytest.raises(LossError, match="a tensor among the arguments of a block was changed in place"):
        value.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.sin(), "1 in place of 3:"),
        (lambda x: x.sum() * 2, "0 in place of 3:"),
        (lambda x: x[:2].sin().sin().sin(), r"torch.float32 of shape \(2, 4\) on cpu in place of .* \(4, 4\) on cpu:"),
        (lambda x: x.sin().sin()[:2].sin(), r"torch.float32 of shape \(2, 4\) on cpu in place of"),
        (lambda x: x.half().sin().sin().sin(), "torch.float16 of shape .* in place of torch.float32 of shape"),
    ],
    ids=["fewer", "none", "shape", "last", "dtype"],
)
@pytest.mark.parametrize("catches", [False, True])
def test_what_does_not_do_the_same_twice_is_an_error(change, message, catches):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.runs = nn.Parameter(torch.ones(())), 0

        def forward(self, x):
            self.runs += 1
            if self.runs % 2:
                return x.sin().sin().sin()
            try:
                return change(x)
            except Exception:
                if catches:
                    return x
                raise

    loss = ft.from_module(Counting(), lambda model, batch: model(batch * model.own).sum())
    step = ft.remat(blocks=[Counting])(ft.train_step(loss, ft.optim.sgd(0.1)))
    with pytest.raises(
        LossError, match=f"remat: a block that was recomputed needed other .* in its first run, {message}"
    ):
        step(step.init(), torch.ones(SIZE, SIZE))


def test_what_is_written_over_after_it_was_saved_is_an_error_as_it_is_without():
    def function(x, w):
        hidden = torch.sigmoid(x @ w)
        hidden *= 2
        return hidden.sin()

    for run, kind in ((function, RuntimeError), (twice(function), LossError)):
        value = run(leaf(), leaf())
        with pytest.raises(kind, match=r"modified by an inplace|needs for its gradient was changed in place"):
            value.sum().backward()


def test_hooks_on_arguments_are_called_once():
    def function(x):
        x.register_hook(lambda grad: grad * 0.5)
        return x.sin().exp()

    x, actual = leaf(), []
    for run in (function, twice(function)):
        actual.append(torch.autograd.grad(run(x * 1).sum(), x)[0])
    assert torch.equal(*actual)


@pytest.mark.parametrize("around", ["nothing", "a block", "hooks"])
def test_a_tensor_that_is_given_twice_is_one_tensor_again(around):
    seen = []

    def function(q, k, named):
        seen.append(q is k is named["v"])
        return q.sin() * k.exp() * named["v"]

    def run(x):
        inner = twice(function)(x, x, named={"v": x})
        return inner * 2

    x = leaf() * 1
    if around == "a block":
        run = twice(run)
    with torch.autograd.graph.saved_tensors_hooks(*[lambda each: each] * 2) if around == "hooks" else nullcontext():
        value = run(x)
    value.sum().backward()
    assert seen == [True, True]


def test_hooks_of_others_may_be_any_callable():
    class Hook:
        def __call__(self, tensor):
            return tensor

    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(functools.partial(Hook()), Hook()):
        value = twice(torch.sin)(x)
    assert torch.equal(torch.autograd.grad(value.sum(), x)[0], x.detach().cos())


# On its first use, torch compiles its own formulas by what it has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_without_a_backward_pass():
    x, tangent = leaf().detach(), leaf().detach()
    expected = torch.func.jvp(torch.sin, (x,), (tangent,))
    assert all(map(torch.equal, torch.func.jvp(twice(torch.sin), (x,), (tangent,)), expected))


class Own(nn.Module):
    """Blocks that draw, one by one or all of them within torch's own recomputation."""

    def __init__(self, each, every):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.each, self.every = each, every

    def forward(self, x):
        def once(x, block):
            return F.dropout(torch.tanh(block(F.dropout(x, 0.5))), 0.5)

        def run(x):
            for block in self.blocks:
                x = checkpoint(once, x, block, use_reentrant=False) if self.each else once(x, block)
            return x

        return checkpoint(run, x, use_reentrant=False) if self.every else run(x)


def trained(each, every, *wrappers):
    torch.manual_seed(0)
    model = nn.Sequential(Own(each, every), Own(each, every)).double()
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    return step(step.init(seed=1), torch.ones(3, SIZE, dtype=torch.float64))[0].params


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("blocks", [[Own], [nn.Linear], [Own, nn.Linear]], ids=["outer", "inner", "both"])
def test_within_and_around_what_torch_runs_again(blocks, each, every):
    expected = trained(False, False)
    actual = trained(each, every, ft.remat(blocks=blocks))
    assert all(map(torch.equal, ft.tree.leaves(actual), ft.tree.leaves(expected)))


@pytest.mark.parametrize(
    "blocks", [pytest.param([Own], id="outer"), pytest.param([nn.Linear], id="inner", marks=pytest.mark.exhaustive)]
)
def test_draws_that_torch_would_repeat_with_other_numbers_in_a_whole_graph_are_refused(blocks):
    whole = ft.compiled(lowering="whole", backend="eager")
    with pytest.raises(TraceError, match=r"recomputed by torch\.utils\.checkpoint"):
        trained(True, True, ft.remat(blocks=blocks), whole)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return F.dropout(torch.tanh(self.own(x)), 0.5)


def test_blocks_within_what_torch_runs_again_do_not_hide_it():
    model = nn.Sequential(Drawing(), Drawing()).double()
    loss = ft.from_module(model, lambda model, batch: checkpoint(model, batch, use_reentrant=False).square().mean())
    step = ft.compose(
        ft.train_step(loss, ft.optim.sgd(0.1)),
        ft.remat(blocks=[Drawing]),
        ft.compiled(lowering="whole", backend="eager"),
    )
    with pytest.raises(TraceError, match=r"recomputed by torch\.utils\.checkpoint"):
        step(step.init(), torch.ones(3, SIZE, dtype=torch.float64))
