"""How a batch is split, and when its loss counts as that of its pieces."""

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
        # What cancels is small beside its parts.
        (mean(1e-4), [mean(-1.0), mean(1.0)], torch.float32, True),
        # The mean of no token is NaN, and so is what is made of it.
        (mean(2.0), [mean(NAN), mean(3.0)], torch.float32, False),
        (mean(NAN), [mean(NAN), mean(3.0)], torch.float32, True),
    ],
)
def test_the_loss_of_a_batch_is_that_of_its_pieces(whole, pieces, dtype, same):
    loss = Loss(lambda *args: None, "loss")
    assert (difference(loss, {"w": torch.ones(2, dtype=dtype)}, whole, pieces) is None) is same


def test_the_loss_of_pieces_is_weighted():
    loss = Loss(lambda *args: None, "loss")
    assert difference(loss, {"w": torch.ones(2)}, mean(4.0), [mean(1.0), mean(3.0, 3.0)]) == (4.0, 2.5)


def test_what_is_no_tensor_is_split_if_it_has_a_value_for_each_example():
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
    whole, other, last = split_batch(batch, 3)
    assert whole["size"] == other["size"] == (2, 3)
    assert other["rate"] == other["pair"][1] == 0.5
    assert other["lengths"] == other["x"].tolist() == other["pair"][0].tolist() == [2, 3]
    assert (other["names"], last["ragged"]) == (("c", "d"), [[4], [5]])
    assert last["array"].tolist() == [[8, 9], [10, 11]]
    uneven = split_batch(batch, 4)
    assert [(len(piece["x"]), *piece["lengths"]) for piece in uneven] == [(2, 0, 1), (2, 2, 3), (1, 4), (1, 5)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_list_is_split_by_the_length_of_the_whole_batch_however_often_that_is_split(size):
    """Constants that are as long as a microbatch, or as the rows of a rank, go to every piece."""

    def loss(params, batch):
        powers = torch.stack([c * batch["x"] ** n for n, c in enumerate(batch["coefs"])])
        weights = torch.as_tensor(batch["weights"], dtype=torch.float64)
        return ((powers.sum(0) * params["w"]).square() * weights).mean()

    batch = {"x": torch.linspace(-1, 1, 8, dtype=torch.float64), "coefs": (1.0, -2.0, 3.0, 0.5), "weights": [*range(8)]}
    base = ft.train_step(loss, ft.optim.sgd(0.1))
    state = base.init({"w": torch.ones((), dtype=torch.float64)})
    expected, evaluated = base(state, batch)[0].params["w"], ft.evaluate(ft.eval_step(loss), state, [batch])["loss"]

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
            assert ft.evaluate(step, state, [batch], on_oom="split")["loss"] == pytest.approx(evaluated, rel=1e-12)

    run(size, rank)


@pytest.mark.parametrize("convert", [list, tuple, np.array], ids=lambda convert: convert.__name__)
def test_microbatches_have_their_own_lengths(convert):
    lengths = [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    batch = {"x": torch.randn(12, 4, dtype=torch.float64), "lengths": convert(lengths)}
    params = {"w": torch.randn(4, 4, dtype=torch.float64)}
    whole = ft.train_step(ragged_mean, ft.optim.sgd(0.1))
    in_pieces = ft.compose(whole, ft.accumulate(3))
    (one, metrics), (other, of_pieces) = (step(step.init(params), batch) for step in (whole, in_pieces))
    torch.testing.assert_close(other.params["w"], one.params["w"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_pieces["loss"], metrics["loss"], rtol=1e-12, atol=1e-12)
