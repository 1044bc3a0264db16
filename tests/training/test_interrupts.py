"""Ctrl-C ends a run of `fit` after the current step, and the handler of SIGINT is then as before.

The handler is Python's own, which raises a KeyboardInterrupt, also if a shell has started the tests in the background:
`conftest.py` of the repository sets it.
"""

import signal
from contextlib import contextmanager

import pytest

from tests.training.problem import assert_bitwise, batches, fit, make_step, train_by_hand


def interrupting(data, at, times=1):
    """Yield the batches of data, and raise SIGINT before the one with the index `at`."""
    for index, batch in enumerate(data):
        if index == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        yield batch


@contextmanager
def sigint_handler(handler):
    """Context in which SIGINT has this handler."""
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("at", [0, 2])
def test_ctrl_c_returns_what_was_trained(at, capsys):
    state, history = fit(make_step(), interrupting(batches(6), at), steps=6)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert history.stopped == "interrupt"
    assert f"fit: ended by SIGINT after step {at + 1}; " in capsys.readouterr().err
    expected, losses = train_by_hand(make_step(), batches(6)[: at + 1])
    assert_bitwise(state, expected)
    assert history["loss"] == losses


def test_a_run_continues_from_the_state_of_one_that_ctrl_c_has_ended():
    step = make_step()
    state, _ = fit(step, interrupting(batches(6), 2), steps=6)
    state, history = fit(step, batches(6)[3:], state, steps=6)
    assert_bitwise(state, train_by_hand(step, batches(6))[0])
    assert history["step"] == [4, 5, 6]


def test_ctrl_c_in_the_last_step_is_no_error():
    _, history = fit(make_step(), interrupting(batches(3), 2))
    assert len(history) == 3


def test_a_run_that_ctrl_c_ends_is_evaluated():
    _, history = fit(make_step(), interrupting(batches(6), 1), evaluate=lambda state: {"step": int(state.step)})
    assert history.stopped == "interrupt"
    assert history["eval_step"] == [2]


def test_a_second_ctrl_c_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt):
        fit(make_step(), interrupting(batches(6), 2, times=2))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_that_is_ignored_stays_ignored():
    """A shell ignores it in background jobs."""
    with sigint_handler(signal.SIG_IGN):
        _, history = fit(make_step(), interrupting(batches(6), 2, times=2))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert len(history) == 6


def test_a_handler_of_the_user_is_restored_and_gets_the_second_signal():
    received = []

    def handler(number, frame):
        received.append(number)

    with sigint_handler(handler):
        _, history = fit(make_step(), interrupting(batches(6), 2, times=2))
        assert signal.getsignal(signal.SIGINT) is handler
    assert received == [signal.SIGINT]
    assert history.stopped == "interrupt"


@pytest.mark.parametrize("error_type", [ZeroDivisionError, KeyboardInterrupt])
def test_the_handler_is_restored_after_an_error(error_type):
    def failing_data():
        yield from batches(2)
        raise error_type

    with pytest.raises(error_type):
        fit(make_step(), failing_data())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
