"""`fit` makes the same steps as a loop by hand: how many it makes, and what it does to the step and its states."""

import itertools
import signal
import threading

import pytest

import ftrain as ft
from ftrain.errors import ConsumedError
from tests.training.problem import assert_bitwise, batches, fit, make_step, params, train_by_hand


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
@pytest.mark.parametrize("donate", [True, False])
def test_fit_is_the_loop_by_hand(wrappers, donate):
    step = make_step(ft.clip(1.0), ft.ema(0.9), *wrappers, lr=ft.schedules.warmup_cosine(0.1, warmup=2, total=8))
    expected, losses = train_by_hand(step, batches())
    state, history = fit(step, batches(), donate=donate)
    assert_bitwise(state, expected)
    assert history["loss"] == losses
    assert history["lr"] == pytest.approx([0.0, 0.05, 0.1, step.optimizer.schedules["lr"](3)])


@pytest.mark.parametrize(
    ("limits", "step_count", "passes", "stopped"),
    [
        ({}, 4, 1, "data"),
        ({"epochs": 1}, 4, 1, "data"),
        ({"epochs": 3}, 12, 3, "data"),
        ({"steps": 3}, 3, 1, "steps"),
        ({"steps": 4}, 4, 1, "steps"),
        ({"steps": 9}, 9, 3, "steps"),
        ({"steps": 9, "epochs": 2}, 8, 2, "data"),
        ({"steps": 6, "epochs": 2}, 6, 2, "steps"),
    ],
)
def test_steps_and_epochs(limits, step_count, passes, stopped):
    class Data:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(batches())

    data = Data()
    state, history = fit(make_step(), data, **limits)
    assert int(state.step) == step_count
    assert history["step"] == list(range(1, step_count + 1))
    assert data.passes == passes
    assert history.stopped == stopped


def test_no_batch_is_drawn_after_the_last_step():
    drawn = []

    def data():
        for batch in itertools.cycle(batches()):
            drawn.append(batch)
            yield batch

    fit(make_step(), data(), steps=3)
    assert len(drawn) == 3


def test_steps_are_counted_from_the_state():
    step = make_step(lr=ft.schedules.warmup_cosine(0.1, warmup=2, total=6))
    uninterrupted, history = fit(step, batches(6), steps=6)
    data = batches(6)
    state, history_of_first = fit(step, data[:4], steps=4)
    state, history_of_second = fit(step, data[4:], state, steps=6)
    assert_bitwise(state, uninterrupted)
    assert history_of_second["step"] == [5, 6]
    assert history_of_first["loss"] + history_of_second["loss"] == history["loss"]
    assert history_of_first["lr"] + history_of_second["lr"] == history["lr"]


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_has_made_its_steps_makes_none_and_logs_that(steps, caplog):
    step = make_step()
    state, _ = fit(step, batches(), steps=3)
    copy = ft.tree.clone(state)
    assert not caplog.messages
    returned, history = fit(step, batches(), state, steps=steps)
    assert_bitwise(returned, copy)
    assert list(history) == []
    assert history.stopped == "steps"
    (message,) = caplog.messages
    assert f"no step is made, for steps={steps}, and 3 were made before" in message


def test_epochs_are_counted_from_the_start_of_the_call():
    step = make_step()
    state, _ = fit(step, batches(), epochs=1)
    state, history = fit(step, batches(), state, epochs=1)
    assert int(state.step) == 8
    assert history["step"] == [5, 6, 7, 8]


def test_donation_changes_no_bit():
    step = make_step(ft.ema(0.9))
    state, history = fit(step, batches(), donate=False)
    donated, donated_history = fit(step, batches(), donate=True)
    assert_bitwise(donated, state)
    assert donated_history["loss"] == history["loss"]


def test_a_donated_state_is_consumed_and_another_is_not_changed():
    step = make_step(ft.ema(0.9))
    state = step.init(params())
    copy = ft.tree.clone(state)
    fit(step, batches(), state, donate=False)
    assert_bitwise(state, copy)
    fit(step, batches(), state, donate=True)
    with pytest.raises(ConsumedError, match="donated"):
        fit(step, batches(), state)


def test_fit_does_not_change_the_step_that_is_passed():
    step = make_step()
    text = repr(step)
    fit(step, batches())
    assert repr(step) == text
    assert not step.donate


def test_fit_in_a_thread():
    """Only the main thread may set handlers of signals, so `fit` sets none in another."""
    handler, results = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: results.append(fit(make_step(), batches(), progress=True)))
    thread.start()
    thread.join()
    assert_bitwise(results[0].state, train_by_hand(make_step(), batches())[0])
    assert signal.getsignal(signal.SIGINT) is handler
