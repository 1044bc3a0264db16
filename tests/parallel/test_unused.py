"""Parameters that some ranks or none use, and blocks that not all ranks run."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from ftrain.parallel import bucket_order, gradient_sums
from tests.parallel.ranks import run, seeded
from tests.parallel.results import assert_leaves_near


class Net(nn.Module):
    """Blocks with a spare layer each, and two experts outside of blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.first, self.second, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, layers=(0, 1, 2), *, spare=False):
        for k in layers:
            x = self.blocks[k](x, spare)
        # Only some examples go to the second expert, and on some ranks none.
        goes_second = x[:, 0] > x[:, 0].mean() if len(x) > 4 else torch.zeros(len(x), dtype=torch.bool)
        routes = (self.first, x[~goes_second]), (self.second, x[goes_second])
        x = torch.cat([expert(part) for expert, part in routes if len(part)])
        return self.spare(x) if spare else x


class Block(nn.Module):
    """A residual layer, and one more that is not always used."""

    def __init__(self):
        super().__init__()
        self.layer, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, spare):
        x = x + self.layer(x).tanh()
        return self.spare(x) if spare else x


def trained(size, level, forward, *wrappers, length=9, steps=2, **options):
    def rank(number):
        with seeded(2):
            net = Net().double()
        loss = ft.from_module(net, lambda net, x: forward(net, x, number).square().mean())
        step = ft.compose(
            ft.train_step(loss, ft.optim.adamw(0.1), **options), *wrappers, ft.sharded(ft.parallel.mesh(), level)
        )
        state = step.init()
        for seed in range(steps):
            x = torch.randn(length, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            state, _ = step(state, x)
        return ft.parallel.whole(state).params

    return run(size, rank)


COMPILED = ft.compiled(lowering="whole", backend="eager")


@pytest.mark.parametrize(
    ("size", "level", "wrappers"),
    [
        (1, 3, ()),
        (2, 0, ()),
        (2, 1, ()),
        (3, 3, ()),
        (2, 3, (ft.accumulate(3),)),
        (2, 3, (COMPILED,)),
        (1, 0, (ft.update_in_backward(),)),
        (2, 2, (ft.update_in_backward(),)),
    ],
    ids=["one", "0", "1", "3", "3-accumulate", "3-compiled", "one-in_backward", "2-in_backward"],
)
def test_parameters_that_no_rank_uses_are_an_error_on_all(size, level, wrappers):
    with pytest.raises(LossError, match=r"does not use 12 of 18 parameters: blocks.0.spare.bias, .*allow_unused=True"):
        trained(size, level, lambda net, x, number: net.first(net.blocks[1](net.blocks[0](x, False), False)), *wrappers)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_parameter_that_some_ranks_use_is_used(level):
    """Of 9 examples ranks have 5 and 4: the second one has none for the second expert."""
    (expected,) = trained(1, 0, lambda net, x, number: torch.cat([net(x[:5], spare=True), net(x[5:], spare=True)]))
    for params in trained(2, level, lambda net, x, number: net(x, spare=True)):
        assert_leaves_near(params, expected)


@pytest.mark.parametrize("around", [None, ft.update_in_backward], ids=["after_backward", "in_backward"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_experts_that_some_ranks_run_and_in_another_order_on_each_train_as_on_one_rank(level, around, monkeypatch):
    """With a bucket for each parameter: buckets are sent in one order, in whatever order gradients come, or not."""
    monkeypatch.setattr(gradient_sums, "SMALLEST_BUCKET", 1)
    monkeypatch.setattr(gradient_sums, "BUCKETS", 1000)
    monkeypatch.setattr(bucket_order, "STREAM_BYTES", 1)
    experts_of_ranks = [("first", "second"), ("second", "spare", "first"), ()]

    def forward(net, x, number):
        for name in experts_of_ranks[number]:
            x = x + getattr(net, name)(x).tanh()
        return net.blocks[0](x, False)

    def by_hand(net, x, number):
        return torch.cat([forward(net, part, index) for index, part in enumerate(x.chunk(3))])

    wrappers = () if around is None else (around(),)
    (expected,) = trained(1, 0, by_hand, allow_unused=True)
    for params in trained(3, level, forward, *wrappers, allow_unused=True):
        assert_leaves_near(params, expected)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_unused_parameters_that_are_allowed_have_a_gradient_of_zero(level):
    def forward(net, x, number):
        return net.first(net.blocks[0](x, False))

    (expected,) = trained(1, 0, forward, allow_unused=True)
    for params in trained(2, level, forward, allow_unused=True):
        assert_leaves_near(params, expected)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (([0, 1, 2], [0, 2, 1]), "is blocks.1 on some and blocks.2 on others"),
        (([0, 1], [0, 1, 2]), "is blocks.2 on some and none on others"),
    ],
    ids=["order", "number"],
)
def test_a_block_that_not_all_ranks_run_is_named(layers, message):
    with pytest.raises(LossError, match=message):
        trained(2, 3, lambda net, x, number: net(x, layers[number], spare=True))


RESULTS = {
    "nothing": lambda loss, rank: (loss, {"cats": loss.detach()} if rank else {}),
    "the metric cats: a tensor, float64": lambda loss, rank: (loss, {("cats", "dogs")[rank]: loss.detach()}),
    "the metric cats: a number": lambda loss, rank: (loss, {"cats": loss.detach() if rank else 1.0}),
    "the loss: a Mean": lambda loss, rank: loss if rank else ft.Mean(loss, torch.ones(())),
}
"""The text of rank 0's result -> a function that returns the result of a rank."""


@pytest.mark.parametrize("text", RESULTS)
def test_different_results_of_the_loss_are_an_error_on_every_rank(text):
    """Without it, sums over ranks would add different metrics."""

    def rank(number):
        loss = lambda params, batch: RESULTS[text]((params["w"] * batch).sum(), number)  # noqa: E731
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), 1))
        state = step.init({"w": torch.ones(4, dtype=torch.float64)})
        with pytest.raises(LossError, match=f"returns other results on other ranks: rank 0 has {text}"):
            step(state, torch.ones(2, 4, dtype=torch.float64))

    run(2, rank)


class Table(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4, sparse=True)

    def forward(self, x):
        return self.embed(x).sum(-1)


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2),)], ids=["alone", "accumulate"])
@pytest.mark.parametrize("level", [0, 2, 3])
def test_a_sparse_gradient_is_an_error_that_names_the_parameter(level, wrappers):
    def rank(_):
        for tables in ([Table()], [Table(), Table()]):  # Two of them are blocks.
            loss = ft.from_module(nn.ModuleList(tables), lambda net, x: sum(table(x) for table in net).mean())
            step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers, ft.sharded(ft.parallel.mesh(), level))
            with pytest.raises(LossError, match=r"the gradient of params\.[01]\.embed\.weight is sparse"):
                step(step.init(seed=0), torch.arange(4))

    run(2, rank)
