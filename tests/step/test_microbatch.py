"""`split_batch`, and `difference`, which compares the loss of a batch with the mean over its pieces."""

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain.step.microbatch import difference, repeat_examples, split_batch
from ftrain.training.oom_retry import split_step
from ftrain.types import Loss
from tests.parallel.models import ragged_mean
from tests.parallel.ranks import run

NAN = float("nan")
LOSS = Loss(lambda *args: None, "loss")  # Its function is not called.


def mean(value, weight=1.0):
    return ft.Mean(torch.tensor(value * weight), torch.tensor(weight))


@pytest.mark.parametrize(
    ("whole", "pieces", "dtype", "agrees"),
    [
        (mean(2.0), [mean(1.0), mean(3.0)], torch.float32, True),
        (mean(2.5), [mean(1.0), mean(3.0, 3.0)], torch.float32, True),
        (mean(4.0), [mean(1.0), mean(3.0)], torch.float32, False),
        (mean(2.01), [mean(1.0), mean(3.0)], torch.float32, False),
        (mean(2.01), [mean(1.0), mean(3.0)], torch.bfloat16, True),
        # The losses of the pieces cancel: the tolerance is relative to their sizes, not to their sum.
        (mean(1e-4), [mean(-1.0), mean(1.0)], torch.float32, True),
        # The mean over no token is NaN, and so is a sum with it.
        (mean(2.0), [mean(NAN), mean(3.0)], torch.float32, False),
        (mean(NAN), [mean(NAN), mean(3.0)], torch.float32, True),
    ],
)
def test_the_loss_of_a_batch_is_compared_with_the_mean_over_its_pieces(whole, pieces, dtype, agrees):
    assert (difference(LOSS, {"w": torch.ones(2, dtype=dtype)}, whole, pieces) is None) == agrees


def test_a_difference_is_returned_with_the_weighted_mean_over_the_pieces():
    assert difference(LOSS, {"w": torch.ones(2)}, mean(4.0), [mean(1.0), mean(3.0, 3.0)]) == (4.0, 2.5)


def test_lists_and_arrays_are_split_if_they_have_a_value_for_each_example():
    batch = {
        "x": torch.arange(6),
        "lengths": [*range(6)],
        "names": tuple("abcdef"),
        "ragged": [[0], [1, 1], [], [3], [4], [5]],
        "array": np.arange(12).reshape(6, 2),
        "size": (2, 3),
        "pair": (torch.arange(6), 0.5),
        "rate": 0.5,
    }
    first, second, last = split_batch(batch, 3)
    assert first["size"] == second["size"] == (2, 3)
    assert second["rate"] == second["pair"][1] == 0.5
    assert second["lengths"] == second["x"].tolist() == second["pair"][0].tolist() == [2, 3]
    assert (second["names"], last["ragged"]) == (("c", "d"), [[4], [5]])
    assert last["array"].tolist() == [[8, 9], [10, 11]]


def test_the_first_pieces_of_a_batch_that_is_not_divisible_are_longer():
    pieces = split_batch({"x": torch.arange(6), "lengths": [*range(6)]}, 4)
    assert [piece["lengths"] for piece in pieces] == [[0, 1], [2, 3], [4], [5]]
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4], [5]]


def test_a_repeated_batch_has_its_examples_again_and_other_leaves_once():
    batch = {
        "x": torch.arange(2),
        "array": np.arange(4).reshape(2, 2),
        "names": ("a", "b"),
        "scale": torch.tensor(3.0),
        "offset": np.array(4),
        "size": (1, 2, 3),
    }
    repeated = repeat_examples(batch, 2)
    assert repeated["x"].tolist() == [0, 1, 0, 1]
    assert repeated["array"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert repeated["names"] == ("a", "b", "a", "b")
    assert (repeated["scale"].tolist(), repeated["offset"].tolist(), repeated["size"]) == (3.0, 4, (1, 2, 3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_a_list_as_long_as_the_whole_batch_is_split(ranks):
    """Among ranks, microbatches and pieces. `coefs` is as long as a part of the batch, and each part gets all of it."""

    def loss(params, batch):
        powers = torch.stack([coef * batch["x"] ** n for n, coef in enumerate(batch["coefs"])])
        weights = torch.as_tensor(batch["weights"], dtype=torch.float64)
        return ((powers.sum(0) * params["w"]).square() * weights).mean()

    def loss_of_two_examples(params, batch):
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return loss(params, batch)

    batch = {"x": torch.linspace(-1, 1, 8, dtype=torch.float64), "coefs": (1.0, -2.0, 3.0, 0.5), "weights": [*range(8)]}
    base = ft.train_step(loss, ft.optim.sgd(0.1))
    state = base.init({"w": torch.ones((), dtype=torch.float64)})
    expected, _ = base(state, batch)
    expected_loss = ft.evaluate(ft.eval_step(loss), state, [batch])["loss"]

    def compare_on_rank(_):
        sharded = ft.sharded(ft.parallel.mesh(), 0)
        for wrappers in ([ft.accumulate(2)], [sharded], [ft.accumulate(2), sharded]):
            for pieces in (1, 2):
                new, _ = split_step(ft.compose(base, *wrappers), pieces)(state, batch)
                torch.testing.assert_close(new.params, expected.params, rtol=1e-12, atol=0)
        for function in (loss, loss_of_two_examples):
            evaluation = ft.eval_step(sharded(ft.train_step(function, ft.optim.sgd(0.1))).loss)
            means = ft.evaluate(evaluation, state, [batch], on_oom="split")
            assert means["loss"] == pytest.approx(expected_loss, rel=1e-12)

    run(ranks, compare_on_rank)


@pytest.mark.parametrize("convert", [list, tuple, np.array], ids=lambda convert: convert.__name__)
def test_each_microbatch_gets_the_lengths_of_its_examples(convert):
    lengths = [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    batch = {"x": torch.randn(12, 4, dtype=torch.float64), "lengths": convert(lengths)}
    params = {"w": torch.randn(4, 4, dtype=torch.float64)}
    whole = ft.train_step(ragged_mean, ft.optim.sgd(0.1))
    accumulated = ft.compose(whole, ft.accumulate(3))
    expected, expected_metrics = whole(whole.init(params), batch)
    new, metrics = accumulated(accumulated.init(params), batch)
    torch.testing.assert_close(new.params, expected.params, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics["loss"], expected_metrics["loss"], rtol=1e-12, atol=1e-12)
