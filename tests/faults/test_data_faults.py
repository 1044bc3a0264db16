"""Data that is empty, ends early, or can be iterated only once."""

import pytest
import torch

import ftrain as ft
from ftrain.errors import DataError, OptionError, StructureError
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, params, squares


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
def test_empty_data_is_an_error(data, limits):
    with failing(DataError, "fit", "no batch", "at least one") as caught:
        fit(data, **limits)
    state, history = caught.value.result
    assert_same_bits(state, make().init(params()))
    assert list(history) == []


def test_an_empty_iterator_is_an_error():
    with failing(DataError, "fit", "no batch"):
        fit(iter([]), steps=3)


def test_the_error_of_data_that_ends_early_has_the_trained_state():
    with failing(DataError, "step 2 of 5", "iterator", "fewer steps") as caught:
        fit(iter([batch(), batch()]), steps=5)
    state, history = caught.value.result
    assert_same_bits(state, trained(2))
    assert history["step"] == [1, 2]
    assert all(isinstance(loss, float) for loss in history["loss"])


def test_data_that_is_empty_in_the_second_epoch_is_an_error():
    class Once:
        def __init__(self):
            self.data = [batch(), batch()]

        def __iter__(self):
            data, self.data = self.data, []
            return iter(data)

    with failing(DataError, "step 2 of 5") as caught:
        fit(Once(), steps=5)
    assert caught.value.result.history["step"] == [1, 2]


def test_several_epochs_of_a_generator_are_an_error():
    with failing(OptionError, "fit", "epochs=2", "iterator", "DataLoader", "steps="):
        fit((batch() for _ in range(4)), epochs=2)


@pytest.mark.parametrize("limits", [{}, {"epochs": 1}, {"steps": 3}, {"steps": 9, "epochs": 1}])
def test_one_epoch_of_a_generator_works(limits):
    state, history = fit((batch() for _ in range(3)), **limits)
    assert int(state.step) == 3
    assert len(history) == 3


@pytest.mark.parametrize("data", [None, 3])
def test_data_that_cannot_be_iterated_is_an_error(data):
    with failing(DataError, "fit", type(data).__name__, "iterable of batches"):
        fit(data)


@pytest.mark.parametrize("name", ["steps", "epochs"])
@pytest.mark.parametrize("value", [0, -1, 2.5, float("inf"), float("nan"), "3"])
def test_wrong_limits_are_errors_that_name_them(name, value):
    with failing(OptionError, "fit", name, repr(value), "whole number"):
        fit([batch()], **{name: value})


@pytest.mark.parametrize("name", ["log_every", "evaluate_every"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_wrong_intervals_are_errors_that_name_them(name, value):
    with failing(OptionError, "fit", name, repr(value), "whole number"):
        fit([batch()], **{name: value})


def test_iterate_checks_before_its_first_step():
    step = make()
    with failing(OptionError, "steps", "0"):
        next(ft.iterate(step, step.init(params()), [batch()], steps=0))


@pytest.mark.parametrize(("data", "dtype"), [([], None), (iter(()), "bf16")])
def test_an_evaluation_without_a_batch_is_an_error(data, dtype):
    with failing(DataError, "evaluate", "no batch"):
        ft.evaluate(ft.eval_step(squares), make().init(params()), data, dtype=dtype)


def test_an_evaluation_with_a_training_step_is_an_error():
    step = make()
    state = step.init(params())
    with failing(ft.errors.ComposeError, "evaluate", "eval_step"):
        ft.evaluate(step, state, [batch()])


def test_fit_with_parameters_in_place_of_a_state_is_an_error():
    with failing(StructureError, "dict", "step.init()"):
        ft.fit(make(), params(), [batch()], progress=False)


@pytest.mark.parametrize("step", [None, 3])
def test_fit_with_an_object_that_is_not_a_step_is_an_error(step):
    with failing(ft.errors.ComposeError, "fit", type(step).__name__, "step"):
        ft.fit(step, make().init(params()), [batch()], progress=False)


def test_an_error_in_fit_has_the_trained_state_and_the_history():
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
