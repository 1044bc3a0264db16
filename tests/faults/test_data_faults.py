"""Data that is empty, ends early, or can be gone through but once."""

import pytest
import torch

import ftrain as ft
from ftrain.errors import DataError, OptionError, StructureError
from tests.faults.problem import assert_bitwise, batch, failing, make, params, squares


def fit(data, step=None, **options):
    step = step or make()
    return ft.fit(step, step.init(params()), data, progress=False, **options)


def trained(count):
    step = make()
    state = step.init(params())
    for _ in range(count):
        state, _ = step(state, batch())
    return state


@pytest.mark.parametrize("limits", [{}, {"steps": 3}, {"epochs": 2}])
@pytest.mark.parametrize("data", [[], (), {}], ids=["list", "tuple", "dict"])
def test_no_data(data, limits):
    with failing(DataError, "fit", "no batch", "at least one") as caught:
        fit(data, **limits)
    state, history = caught.value.result
    assert_bitwise(state, make().init(params()))
    assert list(history) == []


def test_no_data_from_an_iterator():
    with failing(DataError, "fit", "no batch"):
        fit(iter([]), steps=3)


def test_data_that_ends_early_leaves_what_was_trained():
    with failing(DataError, "step 2 of 5", "iterator", "fewer steps") as caught:
        fit(iter([batch(), batch()]), steps=5)
    state, history = caught.value.result
    assert_bitwise(state, trained(2))
    assert history["step"] == [1, 2]
    assert all(isinstance(loss, float) for loss in history["loss"])


def test_data_that_is_empty_the_second_time():
    class Once:
        def __init__(self):
            self.data = [batch(), batch()]

        def __iter__(self):
            data, self.data = self.data, []
            return iter(data)

    with failing(DataError, "step 2 of 5") as caught:
        fit(Once(), steps=5)
    assert caught.value.result.history["step"] == [1, 2]


def test_several_epochs_of_a_generator():
    with failing(OptionError, "fit", "epochs=2", "iterator", "DataLoader", "steps="):
        fit((batch() for _ in range(4)), epochs=2)


@pytest.mark.parametrize("limits", [{}, {"epochs": 1}, {"steps": 3}, {"steps": 9, "epochs": 1}])
def test_one_pass_over_a_generator_is_fine(limits):
    state, history = fit((batch() for _ in range(3)), **limits)
    assert int(state.step) == 3
    assert len(history) == 3


@pytest.mark.parametrize("data", [None, 3])
def test_what_is_no_data(data):
    with failing(DataError, "fit", type(data).__name__, "iterable of batches"):
        fit(data)


@pytest.mark.parametrize("name", ["steps", "epochs"])
@pytest.mark.parametrize("value", [0, -1, 2.5, float("inf"), float("nan"), "3"])
def test_limits_that_are_no_numbers(name, value):
    with failing(OptionError, "fit", name, repr(value), "whole number"):
        fit([batch()], **{name: value})


@pytest.mark.parametrize("name", ["log_every", "evaluate_every"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_intervals_that_are_no_numbers(name, value):
    with failing(OptionError, "fit", name, repr(value), "whole number"):
        fit([batch()], **{name: value})


def test_iterate_checks_before_its_first_step():
    step = make()
    with failing(OptionError, "steps", "0"):
        next(ft.iterate(step, step.init(params()), [batch()], steps=0))


@pytest.mark.parametrize(("data", "dtype"), [([], None), (iter(()), "bf16")])
def test_an_evaluation_of_nothing(data, dtype):
    with failing(DataError, "evaluate", "no batch"):
        ft.evaluate(ft.eval_step(squares), make().init(params()), data, dtype=dtype)


def test_an_evaluation_with_a_training_step():
    step = make()
    state = step.init(params())
    with failing(ft.errors.ComposeError, "evaluate", "eval_step"):
        ft.evaluate(step, state, [batch()])


def test_fit_with_what_is_no_state():
    with failing(StructureError, "dict", "step.init()"):
        ft.fit(make(), params(), [batch()], progress=False)


@pytest.mark.parametrize("step", [None, 3])
def test_fit_with_what_is_no_step(step):
    with failing(ft.errors.ComposeError, "fit", type(step).__name__, "step"):
        ft.fit(step, make().init(params()), [batch()], progress=False)


def test_any_error_of_fit_holds_what_was_trained():
    def loss(params, batch):
        return squares(params, batch)

    step = make(loss, ft.accumulate(2))
    uneven = {**batch(), "y": torch.zeros(2)}
    with failing(ft.errors.BatchError, "batch.x") as caught:
        ft.fit(step, step.init(params()), [batch(), batch(), uneven], progress=False)
    state, history = caught.value.result
    assert int(state.step) == 2
    assert history["step"] == [1, 2]
    step(state, batch())
