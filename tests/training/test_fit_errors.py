"""An error of the data or of a logger ends a run of `fit` unchanged, with the state and the history as its result."""

import dataclasses
import errno

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError
from tests.training.problem import batches, fit, make_step, train_by_hand


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An error that refuses `setattr`: of its result, and of the traceback that contextlib would set."""

    code: int


class SlottedError(Exception):
    """An error with `__slots__`."""

    __slots__ = ("code",)


class ResultError(Exception):
    """An error that has an attribute `result` of its own."""

    result = "of the user"


def failing_data(error):
    """Yield two batches, then raise the error."""
    yield from batches(2)
    raise error


@pytest.mark.parametrize("error_type", [FrozenError, SlottedError, ResultError])
def test_an_error_of_any_type_is_raised_unchanged(error_type):
    error = error_type(3)
    with pytest.raises(error_type) as caught:
        fit(make_step(), failing_data(error))
    assert caught.value is error
    if error_type is ResultError:
        assert error.result == "of the user"
    else:
        assert error.result.history["step"] == [1, 2]
        assert int(error.result.state.step) == 2


def failing_logger(record):
    raise ZeroDivisionError


def test_a_logger_that_fails_does_not_stop_the_other_loggers():
    records = []
    with pytest.raises(ZeroDivisionError) as caught:
        fit(make_step(), batches(), loggers=[failing_logger, records.append], log_every=2)
    assert [record["step"] for record in records] == [1, 2]
    assert caught.value.result.history == records


def test_a_logger_that_fails_after_an_error_does_not_hide_it():
    """After an error the steps that are not logged yet are logged, which fails here."""
    records = []
    with pytest.raises(FrozenError) as caught:
        fit(make_step(), failing_data(FrozenError(1)), loggers=[failing_logger, records.append])
    assert [record["step"] for record in records] == [1, 2]
    assert caught.value.result.history == records
    assert caught.value.__notes__ == ["fit: not all metrics could be recorded: ZeroDivisionError()"]


def test_an_error_of_a_logger_names_the_records_that_are_lost():
    def full_disk(record):
        if record["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        fit(make_step(), batches(), loggers=[full_disk], log_every=3)
    assert any("the records of steps 2 to 3 are not logged again" in note for note in caught.value.__notes__)


def test_data_continues_after_the_last_step_of_a_run_that_an_error_has_ended():
    """Also when the error, which holds the frames of that run, is freed in the middle of the next one."""
    losses, held = [], []

    def failing_at_3(record):
        if record["step"] == 3:
            raise ZeroDivisionError

    def free(record):
        losses.append(record["loss"])
        held.clear()

    step, x, y = make_step(), *(torch.cat(column) for column in zip(*batches(6), strict=True))
    loader = ft.data.loader(ft.data.arrays((x, y)), 4, shuffle=False)
    try:
        fit(step, loader, loggers=[failing_at_3], log_every=1)
    except ZeroDivisionError as error:
        held.append(error)
    state = ft.tree.clone(held[0].result.state)
    fit(step, loader, state, steps=6, loggers=[free], log_every=1)
    assert losses == train_by_hand(step, batches(6))[1][3:]


def test_a_state_whose_metrics_cannot_be_read_is_not_saved(tmp_path):
    """A run that continued from it would lack their records."""

    def wrong(state, batch):
        return state + 1, torch.tensor(1.0)

    with pytest.raises(ComposeError, match="the step returned Tensor as the metrics of step 1") as caught:
        fit(wrong, batches(), torch.zeros(()), steps=4, checkpoints=ft.Checkpoints(tmp_path, every=2))
    assert not hasattr(caught.value, "__notes__")
    assert not ft.Checkpoints(tmp_path, every=2).steps()
