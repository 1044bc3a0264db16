"""`split_batch`, and `difference`, which compares the loss of a batch with the mean over its pieces."""

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain.step.microbatch import difference, split_batch
from ftrain.training.oom_retry import split_step
from ftrain.types import Loss
from tests.parallel.models import ragged_mean
from tests.parallel.ranks import run

NAN = float("nan")


def mean(value, weight=1.0):
    return ft.Mean(torch.tensor(value * weight), torch.tensor(weight))


@pytest.mark.parametrize(
    ("whole", "pieces", "dtype", "same"),
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
def test_the_loss_of_a_batch_is_compared_with_the_mean_over_its_pieces(whole, pieces, dtype, same):
    loss = Loss(lambda *args: None, "loss")
    assert (difference(loss, {"w": torch.ones(2, dtype=dtype)}, whole, pieces) is None) is same


def test_the_loss_of_pieces_is_weighted():
    loss = Loss(lambda *args: None, "loss")
    assert difference(loss, {"w": torch.ones(2)}, mean(4.0), [mean(1.0), mean(3.0, 3.0)]) == (4.0, 2.5)


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
    uneven = split_batch(batch, 4)
    assert [(len(piece["x"]), *piece["lengths"]) for piece in uneven] == [(2, 0, 1), (2, 2, 3), (1, 4), (1, 5)]


@pytest.mark.parametrize("size", [1, 2])
def test_only_a_list_as_long_as_the_whole_batch_is_split(size):
    """The batch is split among ranks, microbatches and pieces. `coefs` is as long as a part of it, and goes to each."""

    def loss(params, batch):
        powers = torch.stack([c * batch["x"] ** n for n, c in enumerate(batch["coefs"])])
        weights = torch.as_tensor(batch["weights"], dtype=torch.float64)
        return ((powers.sum(0) * params["w"]).square() * weights).mean()

    batch = {"x": torch.linspace(-1, 1, 8, dtype=torch.float64), "coefs": (1.0, -2.0, 3.0, 0.5), "weights": [*range(8)]}
    base = ft.train_step(loss, ft.optim.sgd(0.1))
    state = base.init({"w": torch.ones((), dtype=torch.float64)})
    expected = base(state, batch)[0].params["w"]
    expected_loss = ft.evaluate(ft.eval_step(loss), state, [batch])["loss"]

    def rank(_):
        mesh = ft.parallel.mesh()
        for wrappers in ([ft.accumulate(2)], [ft.sharded(mesh, 0)], [ft.accumulate(2), ft.sharded(mesh, 0)]):
            for pieces in (1, 2):
                step = split_step(ft.compose(base, *wrappers), pieces)
                torch.testing.assert_close(step(state, batch)[0].params["w"], expected, rtol=1e-12, atol=0)
        on_ranks = ft.eval_step(ft.compose(base, ft.sharded(mesh, 0)).loss)

        def limited(params, batch):
            if len(batch["x"]) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return loss(params, batch)

        small = ft.eval_step(ft.compose(ft.train_step(limited, ft.optim.sgd(0.1)), ft.sharded(mesh, 0)).loss)
        for step in (on_ranks, small):
            assert ft.evaluate(step, state, [batch], on_oom="split")["loss"] == pytest.approx(expected_loss, rel=1e-12)

    run(size, rank)


@pytest.mark.parametrize("convert", [list, tuple, np.array], ids=lambda convert: convert.__name__)
def test_microbatches_have_their_own_lengths(convert):
    lengths = [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    batch = {"x": torch.randn(12, 4, dtype=torch.float64), "lengths": convert(lengths)}
    params = {"w": torch.randn(4, 4, dtype=torch.float64)}
    whole = ft.train_step(ragged_mean, ft.optim.sgd(0.1))
    in_pieces = ft.compose(whole, ft.accumulate(3))
    expected, expected_metrics = whole(whole.init(params), batch)
    actual, metrics = in_pieces(in_pieces.init(params), batch)
    torch.testing.assert_close(actual.params["w"], expected.params["w"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics["loss"], expected_metrics["loss"], rtol=1e-12, atol=1e-12)
