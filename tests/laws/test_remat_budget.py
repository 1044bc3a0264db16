"""A budget: what is kept lies within it, and no choice of policies within it computes less again."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from ftrain.errors import ComposeError, LossError, OptionError, TraceError
from ftrain.transforms.remat import budget
from ftrain.transforms.remat.budget import PolicyCost, choose
from tests.exhaustive import exhaustive
from tests.laws.test_pipelines import assert_equal
from tests.laws.test_remat import Block, anatomy, build, criterion, make_batch

LAYERS = {"stages": 4, "blocks": 1}


@functools.cache
def sized(share, **sizes):
    actual = anatomy(ft.remat(blocks=[Block], budget=share), **(sizes or LAYERS))
    return actual.most["activations"], sum(actual.flops.values())


def test_a_budget_is_a_share_of_what_the_blocks_keep_beside_their_inputs():
    most, least = (anatomy(*each, **LAYERS) for each in ((), (ft.remat(blocks=[Block]),)))
    whole = most.most["activations"] - least.most["activations"]
    assert sized(1.0) == (most.most["activations"], sum(most.flops.values()))
    assert sized(0) == (least.most["activations"], sum(least.flops.values()))
    again = sum(least.flops.values()) - sum(most.flops.values())
    for share, blocks in ((0.5, 2), (0.75, 3)):
        kept, work = sized(share)
        assert kept == least.most["activations"] + share * whole
        assert work == sum(most.flops.values()) + again * (4 - blocks) // 4


@pytest.mark.parametrize("share", [0.1, 0.45, 0.9, *exhaustive([0.3, 0.6])])
def test_what_is_kept_is_within_the_budget(share):
    sizes = {"stages": 2, "blocks": 3}
    most, least = sized(1, **sizes), sized(0, **sizes)
    kept, work = sized(share, **sizes)
    assert least[0] <= kept <= least[0] + share * (most[0] - least[0])
    assert most[1] < work <= least[1]


def costs(draw, blocks):
    for _ in range(blocks):
        size, work, dots = (int(torch.randint(1, 60, (), generator=draw)) for _ in range(3))
        yield [PolicyCost("full", 0, work + dots), PolicyCost("dots", size // 2, work), PolicyCost("none", size, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_within_the_budget_is_better(seed, monkeypatch):
    given = list(costs(torch.Generator().manual_seed(seed), 6))
    largest = sum(menu[-1].size for menu in given)
    for share in (0, 0.2, 0.5, 0.8, 1):
        chosen = choose(given, share)
        prices = [next(p for p in menu if p.policy == name) for menu, name in zip(given, chosen, strict=True)]
        assert sum(price.size for price in prices) <= share * largest
        allowed = [c for c in itertools.product(*given) if sum(price.size for price in c) <= share * largest]
        assert sum(p.work for p in prices) == min(sum(price.work for price in each) for each in allowed)
    # Where there are too many sums to keep them all, it is still within the budget, and near.
    monkeypatch.setattr(budget, "MAX_SUMS", 30)
    prices = [next(p for p in menu if p.policy == name) for menu, name in zip(given, choose(given, 0.5), strict=True)]
    assert sum(price.size for price in prices) <= 0.5 * largest
    allowed = [c for c in itertools.product(*given) if sum(price.size for price in c) <= 0.45 * largest]
    assert sum(p.work for p in prices) <= min(sum(price.work for price in each) for each in allowed)


def test_each_shape_of_a_batch_is_sized_once(monkeypatch):
    shares = []
    monkeypatch.setattr(budget, "choose", lambda costs, share: shares.append(len(costs)) or choose(costs, share))
    step = build(ft.remat(budget=0.5, blocks=[Block]))
    state = step.init()
    ft.evaluate(ft.eval_step(step.loss), state, [make_batch()])
    assert not shares
    for batch in (4, 4, 2, 4, 2):
        state, _ = step(state, make_batch(batch=batch))
    assert shares == [4, 4]


def test_functions_that_are_blocks():
    @ft.block
    def inner(w, x):
        return torch.tanh(x @ w).sin()

    def loss(params, batch):
        x = batch
        for _ in range(4):
            x = inner(params["w"], x)
        return x.square().sum()

    params, batch = {"w": torch.randn(16, 16, dtype=torch.float64)}, torch.randn(8, 16, dtype=torch.float64)
    plain, half, full = (
        ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
        for wrappers in ((), (ft.remat(budget=0.5),), (ft.remat(),))
    )
    assert_equal(half(half.init(params), batch)[0].params, plain(plain.init(params), batch)[0].params)
    work = [
        ft.anatomy(step, step.init(params), batch, measure=False).flops["tensor contractions"]
        for step in (plain, half, full)
    ]
    assert work[1] - work[0] == (work[2] - work[0]) / 2
    bare = ft.remat(budget=0.5)(ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(0.1)))
    with pytest.raises(ComposeError, match="ran no block"):
        bare(bare.init(params), batch)


def test_what_was_there_before_a_block_is_not_the_blocks(monkeypatch):
    """Although it writes over that, and the backward pass needs what it has written."""
    seen = []
    monkeypatch.setattr(budget, "choose", lambda costs, share: seen.extend(costs) or choose(costs, share))

    @ft.block
    def writing(w, x):
        return torch.relu_(x) * w

    def loss(params, batch):
        return writing(params["w"], batch * params["w"]).sum()

    params, batch = {"w": torch.ones(16)}, torch.ones(8, 16)
    step = ft.remat(budget=1.0)(ft.train_step(loss, ft.optim.sgd(0.1)))
    step(step.init(params), batch)
    # Of the block's own nothing is kept: its product is summed, and its factors were there before.
    assert [(price.policy, price.size) for (menu,) in [seen] for price in menu] == [("none", 0)]


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), True, "half"])
def test_what_is_no_budget(share):
    with pytest.raises(OptionError, match=r"remat: budget is .*, needs a number in \[0, 1\]"):
        ft.remat(budget=share)


@pytest.mark.parametrize(
    "other", [{"policy": "dots"}, {"blocks": {Block: "full"}}, {"blocks": lambda name, part: None}]
)
def test_a_budget_beside_policies(other):
    with pytest.raises(OptionError, match=r"remat: budget=0\.5 chooses the policies of the blocks"):
        ft.remat(budget=0.5, **other)


def test_a_loss_that_asks_for_a_value():
    def asking(model, batch):
        return criterion(model, batch) if bool(model(batch["x"]).sum() < 1e9) else None

    model = nn.Sequential(nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 11)))
    step = ft.remat(budget=0.5)(ft.train_step(ft.from_module(model, asking), ft.optim.sgd(0.1)))
    with pytest.raises(
        TraceError, match=r"remat: with a budget the blocks are measured.*asking.*fails: aten._local_scalar_dense"
    ):
        step(step.init(), make_batch())


def test_a_loss_that_cannot_run_without_values():
    def loss(params, batch):
        return product(params["w"], batch).sum()

    @ft.block
    def product(w, x):
        if type(x) is not torch.Tensor:
            raise RuntimeError("no kernel for this")
        return x @ w

    step = ft.remat(budget=0.5)(ft.train_step(loss, ft.optim.sgd(0.1)))
    with pytest.raises(
        TraceError, match=r"blocks are measured.*fails: no kernel for this\. If it runs without remat, give"
    ):
        step(step.init({"w": torch.ones(2, 2)}), torch.ones(2, 2))


def test_how_it_prints():
    assert "remat(budget=0.5, blocks=4)" in repr(build(ft.remat(budget=0.5, blocks=[Block])))


@pytest.mark.parametrize(("width", "better"), [(16, False), (2048, True)])
def test_products_are_kept_where_that_saves_more_than_it_costs(width, better, monkeypatch):
    """What is kept is looked up for each operation, which takes as long as a small product."""
    seen = []
    monkeypatch.setattr(budget, "choose", lambda costs, share: seen.extend(costs) or choose(costs, share))

    @ft.block
    def block(w, x):
        return (x @ w).sin().cos().exp()

    step = ft.train_step(lambda params, batch: block(params["w"], batch).sum(), ft.optim.sgd(0.1))
    step = ft.remat(budget=0.5)(step)
    ft.anatomy(step, step.init({"w": torch.ones(width, width)}), torch.ones(width, width), measure=False)
    work = {price.policy: price.work for price in seen[0]}
    assert (work["dots"] < work["full"]) == better


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_a_checkpoint_of_the_model_is_refused_since_it_runs_blocks_in_another_order():
    step = ft.train_step(ft.from_module(Checkpointed(), lambda model, x: model(x).square().mean()), ft.optim.sgd(0.1))
    given = torch.randn(2, 4)
    limited = ft.remat(budget=0.5)(step)
    with pytest.raises(LossError, match=r"^remat: the loss recomputes a block by a checkpoint of its own"):
        limited(limited.init(), given)
    whole = ft.remat(budget=1.0)(step)
    whole(whole.init(), given)
