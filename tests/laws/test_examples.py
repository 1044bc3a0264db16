"""An example has the same random numbers in any piece of the batch: accumulated, split, compiled, under remat."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain.training.oom_retry import split_step
from tests.exhaustive import choose

F64 = torch.float64
EXAMPLES, WIDTH = 12, 5


def all_draws(x, rng):
    """Return `x` after draws of all kinds.

    An example takes an odd number of values from each, so that few examples begin at a block of Philox.
    """
    x = ft.random.dropout(rng, x, 0.5)
    first, second = ft.random.split(rng)
    x = x + 10 * ft.random.dropout(first, x.flatten(0, 1), 0.5).view_as(x)
    x = x * ft.random.normal(second, x.shape, dtype=F64)
    # One number for the whole batch, which must be the same in every piece.
    return x * ft.random.uniform(ft.random.fold_in(rng, 7), (), dtype=F64)


def keyed_dropout(x, rng):
    return ft.random.dropout(rng, x, 0.5)


def keyed_and_stock(x, rng):
    """Return `x` after draws from the key, and from torch's generators as stock modules make them."""
    return F.dropout(keyed_dropout(x, rng), 0.25) * torch.rand_like(x[..., 0]).unsqueeze(-1)


def loss_of(drop, *, is_block=False):
    """Return a loss with a parameter for each value of each example; its gradient is the factor of that value."""
    if is_block:
        drop = ft.block(drop)

    def loss(params, batch, rng):
        x = params["w"][batch["index"]].unsqueeze(-1)
        return ft.Mean(drop(x, rng).sum(), torch.tensor(float(len(x)), dtype=F64))

    return loss


def factors(loss, *wrappers, pieces=1):
    """Return the random factor of each value of each example, of shape (EXAMPLES, WIDTH)."""
    step = split_step(ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *wrappers), pieces)
    state = step.init({"w": torch.zeros(EXAMPLES, WIDTH, dtype=F64)}, seed=3)
    new, _ = step(state, {"index": torch.arange(EXAMPLES)})
    return -new.params["w"] * EXAMPLES


def assert_same_factors(actual, expected):
    """Check that the zeros are in the same places, and the other factors equal within the rounding of sums."""
    assert torch.equal(actual == 0, expected == 0)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)


CUTS = {
    "accumulate 2": ((ft.accumulate(2),), 1),
    "accumulate 12": ((ft.accumulate(12),), 1),
    "split 2": ((), 2),
    "split 5": ((), 5),
    "split 12": ((), 12),
    "split 2 of accumulate 2": ((ft.accumulate(2),), 2),
    "split 3 of accumulate 3": ((ft.accumulate(3),), 3),
    "clipped pieces": ((ft.clip(1e9), ft.accumulate(3)), 2),
}
cuts = pytest.mark.parametrize(("wrappers", "pieces"), CUTS.values(), ids=CUTS)
COMPILED = {cut: CUTS[cut] for cut in ("accumulate 2", "split 5", "split 2 of accumulate 2")}
# The first accumulates within the graph; the second has a loop over pieces around it.
compiled_cuts = pytest.mark.parametrize("cut", choose(list(COMPILED), ["accumulate 2", "split 2 of accumulate 2"]))
WHOLE = ft.compiled(lowering="whole", backend="eager")


@functools.cache
def of_whole_batch():
    """Return the factors of a batch in one piece, in a whole graph."""
    return factors(loss_of(keyed_and_stock), WHOLE)


@cuts
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_eager(wrappers, pieces, remat):
    inner = [ft.remat()] if remat else []
    actual = factors(loss_of(all_draws, is_block=remat), *inner, *wrappers, pieces=pieces)
    whole = factors(loss_of(all_draws))
    assert_same_factors(actual, whole)
    assert 0.1 < float((whole == 0).double().mean()) < 0.6


@compiled_cuts
def test_compiled_whole(cut):
    """In a whole graph stock modules draw from the key of the step too, and again in a recomputation."""
    wrappers, pieces = COMPILED[cut]
    actual = factors(loss_of(keyed_and_stock, is_block=True), ft.remat(), *wrappers, WHOLE, pieces=pieces)
    assert_same_factors(actual, of_whole_batch())


@pytest.mark.exhaustive
def test_inductor():
    """Inductor has an operation of its own for the draws of stock modules, which a recomputation must repeat."""
    whole = ft.compiled(lowering="whole")
    actual = factors(loss_of(keyed_and_stock, is_block=True), ft.remat(), whole, pieces=2)
    assert_same_factors(actual, factors(loss_of(keyed_and_stock), whole))


@pytest.mark.parametrize("cut", ["accumulate 2", "split 5"])
def test_compiled_split(cut):
    wrappers, pieces = CUTS[cut]
    split = ft.compiled(lowering="split", backend="eager", fullgraph=True)
    actual = factors(loss_of(keyed_dropout), *wrappers, split, pieces=pieces)
    assert_same_factors(actual, factors(loss_of(keyed_dropout)))


def test_one_graph_of_the_loss_serves_all_pieces():
    """The index of the first example of a piece is an input of the graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    loss = torch.compile(loss_of(keyed_dropout), backend=counter, fullgraph=True)
    for start in (0, 4, 8):
        key = ft.random.for_examples(ft.random.key(0), start, 4)
        loss({"w": torch.ones(EXAMPLES, WIDTH)}, {"index": torch.arange(start, start + 4)}, key)
    assert counter.frame_count == 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, 3)

    def forward(self, x, rng):
        hidden = ft.random.dropout(rng, torch.tanh(self.up(x)), 0.3)
        return self.down(ft.random.dropout(ft.random.fold_in(rng, 1), hidden, 0.3))


def criterion(model, batch, rng):
    scores = model(batch["x"], rng)
    return ft.losses.cross_entropy(scores, batch["labels"]), {"accuracy": ft.losses.accuracy(scores, batch["labels"])}


def train(*wrappers, pieces=1):
    """Return the parameters and the metrics after four steps; one label in four is padding."""
    torch.manual_seed(0)
    step = ft.train_step(ft.from_module(Net().double(), criterion), ft.optim.adamw(0.05))
    step = split_step(ft.compose(step, *wrappers), pieces)
    state = step.init(seed=1)
    draw = torch.Generator().manual_seed(5)
    for _ in range(4):
        labels = torch.randint(-1, 3, (EXAMPLES,), generator=draw)
        labels[labels < 0] = -100
        x = torch.randn(EXAMPLES, WIDTH, dtype=F64, generator=draw)
        state, metrics = step(state, {"x": x, "labels": labels})
    return state.params, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("wrappers", "pieces"),
    [*CUTS.values(), ((ft.accumulate(2), ft.compiled(lowering="whole", backend="eager")), 1)],
    ids=[*CUTS, "compiled"],
)
def test_pieces_equal_the_full_batch_with_dropout(wrappers, pieces):
    actual, metrics = train(*wrappers, pieces=pieces)
    expected, expected_metrics = train()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert {name: metrics[name] for name in expected_metrics} == pytest.approx(expected_metrics, rel=1e-12)


def test_stock_modules_draw_other_numbers_in_pieces_when_eager():
    """They draw from torch's generators, which do not know the pieces; the docs of `accumulate` say so."""
    actual = factors(loss_of(keyed_and_stock), ft.accumulate(2))
    whole = factors(loss_of(keyed_and_stock))
    assert not torch.equal(actual == 0, whole == 0)
    assert len({tuple(row) for row in actual.tolist()}) == EXAMPLES


def test_keys_of_examples_work_under_vmap():
    """A sweep over seeds needs them, with a gradient in pieces."""
    x = torch.ones(EXAMPLES, WIDTH)

    def masks(key, pieces):
        dropped = []
        start = 0
        for piece in x.tensor_split(pieces):
            piece_key = ft.random.for_examples(key, start, len(piece))
            dropped.append(ft.random.dropout(piece_key, piece, 0.5))
            start += len(piece)
        return torch.cat(dropped)

    keys = ft.random.split(ft.random.key(0), 3)
    whole = torch.stack([ft.random.dropout(key, x, 0.5) for key in keys])
    for pieces in (1, 2, 5):
        assert torch.equal(torch.func.vmap(lambda key, pieces=pieces: masks(key, pieces))(keys), whole)
