"""`ft.evaluate(on_oom="split")` evaluates a batch that does not fit in memory in pieces; the means stay exact."""

import math

import pytest
import torch

import ftrain as ft
from ftrain.errors import DeviceError, OptionError
from tests.training.out_of_memory import (
    batches,
    fit,
    loss_that_fits,
    loss_without_dropout,
    make_step,
    params,
    splits,
    unweighted_loss,
)


@pytest.mark.parametrize("examples", [1, 2, 3, 6])
@pytest.mark.parametrize("loss", [unweighted_loss, loss_without_dropout])
def test_an_evaluation_in_pieces_is_exact(examples, loss):
    def loss_alone(params, batch):
        # Without the largest error: it is no mean, and depends on the pieces.
        return loss(params, batch)[0]

    lengths = []
    state, data = make_step().init(params()), [*batches(2, 6), *batches(1, 1), *batches(1, 5)]
    expected = ft.evaluate(ft.eval_step(loss_alone), state, data)
    step = ft.eval_step(loss_that_fits(examples, loss_alone, lengths))
    assert ft.evaluate(step, state, data, on_oom="split") == pytest.approx(expected, rel=1e-12)
    failed = [length for length in lengths if length > examples]
    assert len(failed) <= math.ceil(math.log2(6)), "what does not fit is tried again"


def test_an_evaluation_that_may_not_split_raises_the_error_of_the_device():
    with pytest.raises(torch.OutOfMemoryError):
        ft.evaluate(ft.eval_step(loss_that_fits(3)), make_step().init(params()), batches(1), on_oom="raise")


def test_an_unknown_on_oom_is_refused():
    with pytest.raises(OptionError, match="on_oom"):
        ft.evaluate(ft.eval_step(loss_without_dropout), make_step().init(params()), batches(1), on_oom="skip")


def test_a_single_example_that_does_not_fit_is_an_error():
    message = r"evaluate: memory ran out with a single example of fitting_loss; use shorter"
    with pytest.raises(DeviceError, match=message):
        ft.evaluate(ft.eval_step(loss_that_fits(0)), make_step().init(params()), batches(1), on_oom="split")


def test_a_split_evaluation_does_not_split_the_training():
    training_lengths = []
    evaluation = ft.eval_step(loss_that_fits(2))
    _, history = fit(
        make_step(loss=loss_that_fits(6, lengths=training_lengths)),
        batches(3),
        evaluate_every=1,
        evaluate=lambda state: ft.evaluate(evaluation, state, batches(1), on_oom="split"),
    )
    assert training_lengths == [6, 6, 6]
    assert not splits(history)
