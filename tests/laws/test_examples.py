"""Every example has the same random numbers however its batch is cut: accumulated, split, compiled, in remat."""

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


def everything(x, rng):
    """Draws of every kind; an odd number of each for an example, so that few begin where a block of Philox does."""
    x = ft.random.dropout(rng, x, 0.5)
    first, second = ft.random.split(rng)
    x = x + 10 * ft.random.dropout(first, x.flatten(0, 1), 0.5).view_as(x)
    x = x * ft.random.normal(second, x.shape, dtype=F64)
    # Not by example: one number for the batch, which is the same in every piece.
    return x * ft.random.uniform(ft.random.fold_in(rng, 7), (), dtype=F64)


def one(x, rng):
    return ft.random.dropout(rng, x, 0.5)


def stock(x, rng):
    return F.dropout(one(x, rng), 0.25) * torch.rand_like(x[..., 0]).unsqueeze(-1)


def revealing(drop, *, block=lambda function: function):
    """A loss with a parameter for each number of each example, whose gradient is what that was multiplied by."""
    dropping = block(drop)

    def loss(params, batch, rng):
        x = params["w"][batch["index"]].unsqueeze(-1)
        return ft.Mean(dropping(x, rng).sum(), torch.tensor(float(len(x)), dtype=F64))

    return loss


def factors(loss, *wrappers, pieces=1):
    """What each number of each example was multiplied by."""
    step = split_step(ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *wrappers), pieces)
    state = step.init({"w": torch.zeros(EXAMPLES, WIDTH, dtype=F64)}, seed=3)
    new, _ = step(state, {"index": torch.arange(EXAMPLES)})
    return -new.params["w"] * EXAMPLES


def assert_same(actual, whole):
    """Drawn alike: zeros in the same places, and the rest within the rounding of sums."""
    assert torch.equal(actual == 0, whole == 0)
    torch.testing.assert_close(actual, whole, rtol=1e-13, atol=0)


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
# One is accumulated within the graph, the other by a loop around it.
compiled_cuts = pytest.mark.parametrize("cut", choose(list(COMPILED), ["accumulate 2", "split 2 of accumulate 2"]))
WHOLE = ft.compiled(lowering="whole", backend="eager")


@functools.cache
def of_whole_batch():
    """What the numbers of a batch that is not cut are multiplied by in a graph."""
    return factors(revealing(stock), WHOLE)


@cuts
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_eager(wrappers, pieces, remat):
    loss = revealing(everything, block=ft.block if remat else lambda function: function)
    actual = factors(loss, *([ft.remat()] * remat), *wrappers, pieces=pieces)
    whole = factors(revealing(everything))
    assert_same(actual, whole)
    assert 0.1 < float((whole == 0).double().mean()) < 0.6


@compiled_cuts
def test_compiled_whole(cut):
    """Stock modules too, in a rematerialisation as well: they draw from the key of the step."""
    wrappers, pieces = COMPILED[cut]
    actual = factors(revealing(stock, block=ft.block), ft.remat(), *wrappers, WHOLE, pieces=pieces)
    assert_same(actual, of_whole_batch())


@pytest.mark.exhaustive
def test_inductor():
    """Which draws what stock modules ask for by an operation of its own, in a rematerialisation too."""
    whole = ft.compiled(lowering="whole")
    pieces = factors(revealing(stock, block=ft.block), ft.remat(), whole, pieces=2)
    assert_same(pieces, factors(revealing(stock), whole))


@pytest.mark.parametrize("cut", ["accumulate 2", "split 5"])
def test_compiled_split_by_the_losses_own_key(cut):
    wrappers, pieces = CUTS[cut]
    split = ft.compiled(lowering="split", backend="eager", fullgraph=True)
    assert_same(factors(revealing(one), *wrappers, split, pieces=pieces), factors(revealing(one)))


def test_one_graph_of_the_loss_serves_all_pieces():
    """Where a piece begins is an input."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    loss = torch.compile(revealing(one), backend=counter, fullgraph=True)
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


def trained(*wrappers, pieces=1):
    torch.manual_seed(0)
    step = ft.train_step(ft.from_module(Net().double(), criterion), ft.optim.adamw(0.05))
    step = split_step(ft.compose(step, *wrappers), pieces)
    state, draw = step.init(seed=1), torch.Generator().manual_seed(5)
    for _ in range(4):
        labels = torch.randint(-1, 3, (EXAMPLES,), generator=draw)
        batch = {"x": torch.randn(EXAMPLES, WIDTH, dtype=F64, generator=draw), "labels": labels}
        batch["labels"] = labels.where(labels >= 0, torch.full_like(labels, -100))
        state, metrics = step(state, batch)
    return state.params, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("wrappers", "pieces"),
    [*CUTS.values(), ((ft.accumulate(2), ft.compiled(lowering="whole", backend="eager")), 1)],
    ids=[*CUTS, "compiled"],
)
def test_with_dropout_too_it_is_the_update_of_the_full_batch(wrappers, pieces):
    actual, metrics = trained(*wrappers, pieces=pieces)
    expected, whole = trained()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert {name: metrics[name] for name in whole} == pytest.approx(whole, rel=1e-12)


def test_stock_modules_draw_for_each_piece_where_nobody_counts():
    """Eagerly from torch's generators: the law above is not theirs, as `accumulate` says."""
    actual, whole = factors(revealing(stock), ft.accumulate(2)), factors(revealing(stock))
    assert not torch.equal(actual == 0, whole == 0)
    assert len({tuple(row) for row in actual.tolist()}) == EXAMPLES


def test_keys_of_several_runs_at_once():
    """A vmapped gradient in pieces: what a sweep over seeds needs."""
    w = torch.ones(EXAMPLES, WIDTH)

    def masks(key, pieces):
        lengths = [len(part) for part in w.tensor_split(pieces)]
        keys = [ft.random.for_examples(key, sum(lengths[:i]), length) for i, length in enumerate(lengths)]
        parts = zip(keys, lengths, strict=True)
        return torch.cat([ft.random.dropout(key, torch.ones(length, WIDTH), 0.5) for key, length in parts])

    keys = ft.random.split(ft.random.key(0), 3)
    whole = torch.stack([ft.random.dropout(key, w, 0.5) for key in keys])
    for pieces in (1, 2, 5):
        assert torch.equal(torch.func.vmap(lambda key, pieces=pieces: masks(key, pieces))(keys), whole)
