"""`replay` returns the state and the batch before a step of a run, and warns if they are not those of the run."""

import contextlib

import pytest
import torch

import ftrain as ft
from ftrain.errors import CheckpointError, OptionError
from tests.exhaustive import choose
from tests.training.interrupted_runs import BATCHES, EVERY, STEPS, Positioned, batches, fit, make


@pytest.mark.parametrize("at", choose([1, 2, 4, 5, 6, 9, STEPS], [1, 4, 6, STEPS]))
@pytest.mark.parametrize("data_class", [list, Positioned])
def test_a_step_is_replayed(at, data_class, tmp_path):
    step, data = make(ft.clip(1.0)), data_class(batches())
    checkpoints = ft.Checkpoints(tmp_path, every=EVERY, keep=2)
    expected = fit(step, data, checkpoints=checkpoints)
    first_state = step.init(seed=3)
    state, batch = ft.replay(step, first_state, data, checkpoints, at=at)
    assert int(state.step) == at - 1
    assert torch.equal(batch, batches()[(at - 1) % BATCHES])
    _, metrics = step(state, batch)
    assert float(metrics["loss"]) == expected.history["loss"][at - 1]
    assert float(metrics["grad_norm"]) == expected.history["grad_norm"][at - 1]
    # The replay has not consumed the first state.
    step(first_state, batch)


@pytest.mark.parametrize(("every", "at"), [(6, 11), (6, 10), (4, 11), (6, 9), (6, 8)])
def test_a_replay_that_is_not_the_run_is_warned_of(every, at, tmp_path):
    """The learning rate falls after steps 4 and 8. A replay does not repeat that: one across step 8 is wrong."""
    step = make(optimizer=ft.optim.adjustable(ft.optim.sgd(0.1)))
    checkpoints = ft.Checkpoints(tmp_path, every=every, keep=9)
    _, history = fit(
        step,
        batches(),
        evaluate=lambda state: {"a": 1.0},
        evaluate_every=4,
        adapt=ft.plateau("eval_a", ft.schedules.reduce_on_plateau(patience=0)),
        checkpoints=checkpoints,
    )
    differs = every == 6 and at > 8
    warning = pytest.warns(UserWarning, match="replay: lr of step 9 is") if differs else contextlib.nullcontext()
    with warning:
        state, batch = ft.replay(step, step.init(seed=3), batches(), checkpoints, at=at)
    _, metrics = step(state, batch)
    assert (float(metrics["lr"]) != history["lr"][at - 1]) == differs


def test_replay_needs_a_checkpoint_or_a_first_state_before_the_step(tmp_path):
    step = make()
    checkpoints = ft.Checkpoints(tmp_path, every=EVERY, keep=1)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        ft.replay(step, step.init(seed=3), batches(), checkpoints, at=3)
    actual = fit(step, batches(), checkpoints=checkpoints)
    with pytest.raises(CheckpointError, match="is from before step 3"):
        ft.replay(step, actual.state, batches(), checkpoints, at=3)
    with pytest.raises(OptionError, match="at is 0"):
        ft.replay(step, step.init(seed=3), batches(), checkpoints, at=0)


@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: ft.data.prefetch(loader, "cpu")])
def test_a_run_begins_where_the_data_begins_if_a_batch_was_looked_at_before(wrap, tmp_path, recwarn):
    """As by ``next(iter(data))``, after which the next pass starts at the first batch again."""

    def data():
        return wrap(ft.data.loader(ft.data.arrays(torch.arange(24.0).view(6, 4)), 2, shuffle=False))

    looked_at, checkpoints = data(), ft.Checkpoints(tmp_path, every=9)
    first = next(iter(looked_at))
    step = make()
    ft.fit(step, step.init(), looked_at, steps=2, checkpoints=checkpoints, progress=False)
    _, batch = ft.replay(step, step.init(), data(), checkpoints, at=1)
    assert torch.equal(batch, first)
    assert not recwarn
