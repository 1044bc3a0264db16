"""A step that runs out of memory at any of its operations is made again in pieces, and gives the same state.

The expected state is that of a loop by hand, whose later steps are in two pieces.
"""

import re

import pytest
import torch

import ftrain as ft
from ftrain.errors import ConsumedError, DeviceError
from ftrain.training.oom_retry import split_step
from tests.training.out_of_memory import (
    batches,
    count_operations,
    fit,
    loss,
    loss_without_dropout,
    make_step,
    out_of_memory_at,
    splits,
    train_by_hand,
)
from tests.training.problem import assert_bitwise

STRIDE = 17
"""Every 17th operation is tried, and the last, with another offset in each case. `make test-all` tries all."""

strides = pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=pytest.mark.exhaustive)])


def every_nth(count, stride, offset=0):
    """Return the indices of every `stride`-th of `count` operations, and of the last."""
    return sorted({*range(offset % stride, count, stride), count - 1})


STACKS = {
    "before": ((), False),
    "after": ((), True),
    "guarded": ((ft.skip_nonfinite(3),), True),
    "accumulate": ((ft.accumulate(3),), False),
    "full": ((ft.accumulate(2), ft.clip(1.0), ft.ema(0.9)), True),
}
"""Wrappers, and whether memory runs out after the operation instead of before it."""


@strides
@pytest.mark.parametrize("name", STACKS)
def test_a_state_that_is_not_donated_is_intact(name, stride):
    stack, after = STACKS[name]
    # Dropout adds many operations, which the stacks without `accumulate` cover.
    step = make_step(*stack, loss=loss_without_dropout if name in ("accumulate", "full") else loss)
    data = batches(2)
    expected = train_by_hand(step, data, split_from=1)
    for index in every_nth(count_operations(step, 1, donate=False), stride, 2 * list(STACKS).index(name)):
        with out_of_memory_at(1, index, after=after) as mode:
            state, history = fit(step, data, donate=False)
        assert mode.remaining == 0
        assert_bitwise(state, expected)
        assert splits(history) == {2: 2}
        assert history["step"] == [1, 2]


@strides
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_donated_state_is_intact_or_taken_from_the_checkpoint(after, stride, tmp_path):
    step, data = make_step(ft.clip(1.0)), batches(2)
    expected = train_by_hand(step, data, split_from=1)
    errors = {}
    for index in every_nth(count_operations(step, 1), stride, 2 * after):
        with out_of_memory_at(1, index, after=after):
            try:
                state, _ = fit(step, data)
            except DeviceError as error:
                errors[index] = error
            else:
                assert not errors, "only the last operations of a step overwrite the state"
                assert_bitwise(state, expected)
    assert errors
    for index, error in errors.items():
        assert re.search(r"(?s)overwrite.*checkpoints=", str(error))
        with pytest.raises(ConsumedError):
            _ = error.result.state.params
        with out_of_memory_at(1, index, after=after):
            checkpoints = ft.Checkpoints(tmp_path / str(index), every=1, async_=False)
            state, history = fit(step, data, checkpoints=checkpoints)
        assert_bitwise(state, expected)
        assert splits(history) == {2: 2}
        assert history["step"] == [1, 2]


@pytest.mark.parametrize(
    ("optimizer", "wrappers"), [(ft.optim.lion(0.1), ()), (ft.optim.adamw(0.1), (ft.ema(0.9),))], ids=["lion", "ema"]
)
def test_a_guarded_update_without_fused_kernels_overwrites_nothing_before_memory_can_run_out(optimizer, wrappers):
    step = make_step(ft.skip_nonfinite(3), *wrappers, loss=loss_without_dropout, optimizer=optimizer)
    data = batches(2)
    expected = train_by_hand(step, data, split_from=1)
    # The last operations: the new parameters exist already, the new counters do not.
    for index in range(count_operations(step, 1))[-25::2]:
        with out_of_memory_at(1, index, after=True) as mode:
            assert_bitwise(fit(step, data).state, expected)
        assert mode.remaining == 0


def test_a_retry_from_an_overwritten_state_would_give_a_wrong_update(monkeypatch):
    """Shows that the tests above can fail: without the record of writes some retries start from a changed state."""
    always_false = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr("ftrain.training.oom_retry._StateWrites.begun", always_false)
    step, data = make_step(), batches(2)
    expected, wrong_count = train_by_hand(step, data, split_from=1), 0
    # The last operations write the state.
    for index in range(count_operations(step, 1))[-10:]:
        with out_of_memory_at(1, index, after=True):
            state, _ = fit(step, data)
        pairs = zip(ft.tree.leaves(state), ft.tree.leaves(expected), strict=True)
        wrong_count += not all(torch.equal(a, b) for a, b in pairs)
    assert wrong_count


def compile_once(step, monkeypatch):
    """Let all runs of a test use this compiled step and the same step in two pieces; return the latter.

    Each run of `fit` adds a wrapper of its own to a step, which records when the step begins to overwrite its state,
    and so would compile the step again. It can be left out if memory runs out in a step that is one graph: this does
    not call the wrapper when it runs.
    """
    split = split_step(step, 2)
    monkeypatch.setattr(
        "ftrain.training.oom_retry.split_step", lambda whole, pieces, recording: split if pieces == 2 else whole
    )
    return split


@strides
@pytest.mark.parametrize(
    ("donate", "after"), [(False, False), (False, True), (True, True)], ids=["before", "after", "donated"]
)
def test_a_compiled_step_may_run_out_of_memory_at_every_operation(donate, after, stride, tmp_path, monkeypatch):
    """The backend "eager" runs the graph operation by operation, so that memory can run out between any two."""
    step = make_step(ft.compiled(lowering="whole", backend="eager"), loss=loss_without_dropout)
    data = batches(2)
    split = compile_once(step.donating if donate else step, monkeypatch)
    count = count_operations(step, 1, donate=donate)
    for step_index in (0, 1):
        expected = train_by_hand(step, data, split_from=step_index, split=None if donate else split)
        # The first step keeps a copy of the state that it overwrites. The second does not, and needs a checkpoint.
        needs_checkpoint = donate and step_index == 1
        for index in every_nth(count, stride, 3 * step_index + after + donate):
            checkpoints = ft.Checkpoints(tmp_path / str(index), every=1, async_=False) if needs_checkpoint else None
            with out_of_memory_at(step_index, index, after=after) as mode:
                state, history = fit(step, data, donate=donate, checkpoints=checkpoints)
            assert mode.remaining == 0
            assert_bitwise(state, expected)
            assert splits(history) == {step_index + 1: 2}


@pytest.fixture
def step_of_two_graphs():
    """A compiled step whose gradient is one graph and whose update is another."""
    return make_step(ft.compiled(backend="eager", lowering="split"), loss=loss_without_dropout)


def test_the_first_step_of_two_graphs_is_made_again_from_a_copy_of_its_state(step_of_two_graphs):
    data = batches(2)
    # The first run of a loss also checks it, with more operations, so the second run is counted.
    count_operations(step_of_two_graphs, 0)
    last = count_operations(step_of_two_graphs, 0) - 1
    with out_of_memory_at(0, last, after=True) as mode:
        state, history = fit(step_of_two_graphs, data)
    assert mode.remaining == 0
    assert_bitwise(state, train_by_hand(step_of_two_graphs, data, split_from=0))
    assert splits(history) == {1: 2}


def test_a_later_step_of_two_graphs_keeps_its_state_until_it_has_its_gradient(step_of_two_graphs):
    data = batches(2)
    # The operation with the index 5 is one of the gradient. There is neither a copy of the state nor a checkpoint.
    with out_of_memory_at(1, 5) as mode:
        state, _ = fit(step_of_two_graphs, data)
    assert mode.remaining == 0
    assert_bitwise(state, train_by_hand(step_of_two_graphs, data, split_from=1))


def test_a_later_step_of_two_graphs_needs_a_checkpoint_if_memory_runs_out_in_its_update(step_of_two_graphs, tmp_path):
    data = batches(2)
    last = count_operations(step_of_two_graphs, 1) - 1
    with out_of_memory_at(1, last, after=True), pytest.raises(DeviceError, match="begun to overwrite its state"):
        fit(step_of_two_graphs, data)
    with out_of_memory_at(1, last, after=True) as mode:
        state, _ = fit(step_of_two_graphs, data, checkpoints=ft.Checkpoints(tmp_path, every=1))
    assert mode.remaining == 0
    assert_bitwise(state, train_by_hand(step_of_two_graphs, data, split_from=1))
