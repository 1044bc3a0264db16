"""A step leaves its module as it was: tensors, modes, attributes, and what the module registers as it runs."""

import pytest
import torch
from torch import nn

import ftrain as ft
from tests.step.modules import CASES, all_cases, make_case, make_step, mean_square, train, vectors
from tests.step.states import assert_same_bits, assert_unchanged, snapshot


@all_cases
@pytest.mark.parametrize("training", [True, False])
def test_steps_and_evaluations_leave_the_module_as_it_was(name, training):
    module, make_batch, criterion = make_case(name)
    module.train(training)
    if name == "net":
        module.drop.training = not training
    before = snapshot(module)
    step = make_step(module, criterion, ft.ema(0.9), ft.donated())
    state = train(step, make_batch)
    ft.evaluate(ft.eval_step(ft.from_module(module, criterion)), state, [make_batch(9)])
    assert_unchanged(module, before)


@pytest.mark.parametrize(
    ("name", "wrappers"),
    [
        *((name, ()) for name in CASES),
        ("net", (ft.with_amp("bf16"), ft.ema(0.9))),
        ("net", (ft.compiled(backend="eager", lowering="whole"),)),
    ],
)
def test_an_exception_leaves_the_module_as_it_was(name, wrappers):
    module, make_batch, criterion = make_case(name)
    module.eval()
    before = snapshot(module)

    def failing(model, batch):
        criterion(model, batch)
        raise ZeroDivisionError("on purpose")

    step = make_step(module, failing, *wrappers)
    # A captured step raises an error of another class, which names this one.
    with pytest.raises(Exception, match="on purpose"):
        step(step.init(), make_batch())
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        ft.evaluate(ft.eval_step(ft.from_module(module, failing)), step.init(), [make_batch()])
    assert_unchanged(module, before)


def module_of_blocks():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)) for _ in range(3)]
    return nn.Sequential(*blocks).double()


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_remat_leaves_the_module_as_it_was_and_changes_no_bit(policy):
    module = module_of_blocks()
    before = snapshot(module)
    state = train(make_step(module, mean_square, ft.remat(policy)), vectors)
    assert_same_bits(state.params, train(make_step(module, mean_square), vectors).params)
    assert_unchanged(module, before)


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_an_exception_under_remat_leaves_the_module_as_it_was(policy):
    module = module_of_blocks()
    before = snapshot(module)

    def failing(model, batch):
        model(batch)
        raise ZeroDivisionError("on purpose")

    step = make_step(module, failing, ft.remat(policy))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        step(step.init(), vectors())
    assert_unchanged(module, before)


class FilledByFirstBatch(nn.Module):
    """Has a buffer that is None until the first batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("first", None)

    def forward(self, x):
        if self.first is None:
            self.first = x.detach().mean()
        return self.inner(x) * self.first


def test_a_buffer_that_was_none_is_none_after_a_step():
    # If it had a value, the second step would depend on a tensor that is not in the TrainState.
    module = FilledByFirstBatch().double()
    before = snapshot(module)
    step = make_step(module, mean_square)
    state = step.init()
    expected, _ = step(state, vectors())
    assert_unchanged(module, before)
    step(state, vectors(seed=1))
    again, _ = step(state, vectors())
    assert_same_bits(again.params, expected.params)


def test_a_module_compiled_by_torch_is_left_as_it_was():
    inner = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    module = torch.compile(inner, backend="eager")
    before = sorted(vars(module))
    step = make_step(module, mean_square)
    step(step.init(), vectors())
    assert sorted(vars(module)) == before
    # The wrapper of torch and the module inside still have one mode.
    module.eval()
    assert not inner[1].training
    assert not module.training


class Registering(nn.Module):
    """Registers a buffer when it first runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "scaled"):
            self.register_buffer("scaled", torch.full((4,), 0.5), persistent=False)
        return torch.tanh(self.inner(x) * self.scaled)


@pytest.mark.parametrize("wrappers", [(), (ft.remat(),), (ft.remat("dots"), ft.accumulate(2))], ids=len)
def test_a_buffer_that_a_module_registers_as_it_runs_does_not_stay(wrappers):
    module = nn.Sequential(Registering(), Registering())
    step = make_step(module, mean_square, *wrappers)
    state, _ = step(step.init(), torch.randn(4, 4))
    assert list(module.named_buffers()) == []
    assert not state.buffers


class Hooking(nn.Module):
    """Registers a hook when it first runs, as models of transformers do to record hidden states."""

    def __init__(self):
        super().__init__()
        self.inner, self.is_hooked, self.recorded = nn.Linear(4, 4), False, []

    def forward(self, x):
        if not self.is_hooked:
            self.inner.register_forward_hook(lambda module, args, output: self.recorded.append(len(args)))
            self.is_hooked = True
        self.recorded.clear()
        return self.inner(x) * len(self.recorded)


def test_a_hook_that_a_module_registers_while_it_is_captured_does_not_stay():
    """Its flag `is_hooked` does not stay either, so that the next run registers one hook, not a second."""
    module = Hooking()
    step = make_step(module, mean_square, ft.compiled(lowering="whole", backend="aot_eager"))
    step(step.init(), torch.randn(2, 4))
    module(torch.randn(2, 4))
    assert len(module.recorded) == 1
