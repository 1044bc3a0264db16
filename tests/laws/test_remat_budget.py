"""With a budget, no more is kept than it allows, and no other choice of policies within it recomputes less."""

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
from tests.bits import assert_same_bits
from tests.exhaustive import exhaustive
from tests.laws.remat_model import Block, anatomy, build, criterion, make_batch

LAYERS = {"stages": 4, "blocks": 1}


@functools.cache
def kept_and_work(share, **sizes):
    """Return the bytes of activations and the floating-point operations of a step with this budget."""
    report = anatomy(ft.remat(blocks=[Block], budget=share), **(sizes or LAYERS))
    return report.most["activations"], sum(report.flops.values())


def test_a_budget_is_a_share_of_what_the_blocks_keep_beside_their_inputs():
    plain, full = anatomy(**LAYERS), anatomy(ft.remat(blocks=[Block]), **LAYERS)
    plain_kept, plain_work = plain.most["activations"], sum(plain.flops.values())
    full_kept, full_work = full.most["activations"], sum(full.flops.values())
    assert kept_and_work(1.0) == (plain_kept, plain_work)
    assert kept_and_work(0) == (full_kept, full_work)
    for share, recomputed_blocks in ((0.5, 2), (0.75, 1)):
        kept, work = kept_and_work(share)
        assert kept == full_kept + share * (plain_kept - full_kept)
        assert work == plain_work + (full_work - plain_work) * recomputed_blocks // 4


@pytest.mark.parametrize("share", [0.1, 0.45, 0.9, *exhaustive([0.3, 0.6])])
def test_no_more_is_kept_than_the_budget_allows(share):
    sizes = {"stages": 2, "blocks": 3}
    plain_kept, plain_work = kept_and_work(1, **sizes)
    full_kept, full_work = kept_and_work(0, **sizes)
    kept, work = kept_and_work(share, **sizes)
    assert full_kept <= kept <= full_kept + share * (plain_kept - full_kept)
    assert plain_work < work <= full_work


def random_menus(seed, blocks):
    """Return for each block the costs of three policies, of which one that keeps more recomputes less."""
    generator = torch.Generator().manual_seed(seed)
    menus = []
    for _ in range(blocks):
        size, work, dots = (int(torch.randint(1, 60, (), generator=generator)) for _ in range(3))
        full, none = PolicyCost("full", 0, work + dots), PolicyCost("none", size, 0)
        menus.append([full, PolicyCost("dots", size // 2, work), none])
    return menus


def size_of(costs):
    return sum(cost.size for cost in costs)


def work_of(costs):
    return sum(cost.work for cost in costs)


def chosen_costs(menus, share):
    """Return the costs of the policies that `choose` takes, one for each block."""
    chosen = []
    for menu, policy in zip(menus, choose(menus, share), strict=True):
        chosen += [cost for cost in menu if cost.policy == policy]
    return chosen


def least_work(menus, budget):
    """Return the least work of all choices of policies that keep at most `budget`, by trying them all."""
    return min(work_of(costs) for costs in itertools.product(*menus) if size_of(costs) <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_within_the_budget_is_better(seed, monkeypatch):
    menus = random_menus(seed, blocks=6)
    largest = size_of(menu[-1] for menu in menus)
    for share in (0, 0.2, 0.5, 0.8, 1):
        costs = chosen_costs(menus, share)
        assert size_of(costs) <= share * largest
        assert work_of(costs) == least_work(menus, share * largest)
    # With more sums than are kept, the choice is within the budget, and no worse than the best one of a smaller budget.
    monkeypatch.setattr(budget, "MAX_SUMS", 30)
    costs = chosen_costs(menus, 0.5)
    assert size_of(costs) <= 0.5 * largest
    assert work_of(costs) <= least_work(menus, 0.45 * largest)


@pytest.fixture
def measurements(monkeypatch):
    """The costs of the policies of all blocks, a list of menus for each time that they are measured."""
    recorded = []

    def recording_choose(menus, share):
        recorded.append(menus)
        return choose(menus, share)

    monkeypatch.setattr(budget, "choose", recording_choose)
    return recorded


def test_blocks_are_measured_once_for_each_shape_of_a_batch(measurements):
    step = build(ft.remat(budget=0.5, blocks=[Block]))
    state = step.init()
    ft.evaluate(ft.eval_step(step.loss), state, [make_batch()])
    assert measurements == []
    for batch in (4, 4, 2, 4, 2):
        state, _ = step(state, make_batch(batch=batch))
    assert [len(menus) for menus in measurements] == [4, 4]


def test_functions_may_be_blocks():
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
    assert_same_bits(half(half.init(params), batch)[0].params, plain(plain.init(params), batch)[0].params)
    work = [
        ft.anatomy(step, step.init(params), batch, measure=False).flops["tensor contractions"]
        for step in (plain, half, full)
    ]
    plain_work, half_work, full_work = work
    assert half_work - plain_work == (full_work - plain_work) / 2
    without_blocks = ft.remat(budget=0.5)(ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(0.1)))
    with pytest.raises(ComposeError, match="ran no block"):
        without_blocks(without_blocks.init(params), batch)


def test_a_block_is_not_charged_for_an_input_that_it_overwrites(measurements):
    """The backward pass needs what it has written, but the memory existed before the block."""

    @ft.block
    def writing(w, x):
        return torch.relu_(x) * w

    def loss(params, batch):
        return writing(params["w"], batch * params["w"]).sum()

    params, batch = {"w": torch.ones(16)}, torch.ones(8, 16)
    step = ft.remat(budget=1.0)(ft.train_step(loss, ft.optim.sgd(0.1)))
    step(step.init(params), batch)
    # Nothing else is kept: the product is summed, and its factors existed before.
    ((menu,),) = measurements
    assert [(cost.policy, cost.size) for cost in menu] == [("none", 0)]


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), True, "half"])
def test_a_budget_out_of_range_is_refused(share):
    with pytest.raises(OptionError, match=r"remat: budget is .*, needs a number in \[0, 1\]"):
        ft.remat(budget=share)


@pytest.mark.parametrize(
    "policies", [{"policy": "dots"}, {"blocks": {Block: "full"}}, {"blocks": lambda name, part: None}]
)
def test_a_budget_beside_policies_is_refused(policies):
    with pytest.raises(OptionError, match=r"remat: budget=0\.5 chooses the policies of the blocks"):
        ft.remat(budget=0.5, **policies)


def test_a_loss_that_reads_a_value_is_refused():
    def reads_a_value(model, batch):
        return criterion(model, batch) if bool(model(batch["x"]).sum() < 1e9) else None

    model = nn.Sequential(nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 11)))
    step = ft.remat(budget=0.5)(ft.train_step(ft.from_module(model, reads_a_value), ft.optim.sgd(0.1)))
    with pytest.raises(
        TraceError,
        match=r"remat: with a budget the blocks are measured.*reads_a_value.*fails: aten._local_scalar_dense",
    ):
        step(step.init(), make_batch())


def test_a_loss_that_cannot_run_on_fake_tensors_is_refused():
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


def test_it_prints():
    assert "remat(budget=0.5, blocks=4)" in repr(build(ft.remat(budget=0.5, blocks=[Block])))


@pytest.mark.parametrize(("width", "saves"), [(16, False), (2048, True)])
def test_products_are_kept_where_that_saves_more_than_it_costs(width, saves, measurements):
    """A policy is asked for each operation, which takes as long as a small product."""

    @ft.block
    def block(w, x):
        return (x @ w).sin().cos().exp()

    step = ft.train_step(lambda params, batch: block(params["w"], batch).sum(), ft.optim.sgd(0.1))
    step = ft.remat(budget=0.5)(step)
    ft.anatomy(step, step.init({"w": torch.ones(width, width)}), torch.ones(width, width), measure=False)
    work = {cost.policy: cost.work for cost in measurements[0][0]}
    assert (work["dots"] < work["full"]) == saves


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
    batch = torch.randn(2, 4)
    limited = ft.remat(budget=0.5)(step)
    with pytest.raises(LossError, match=r"^remat: the loss recomputes a block by a checkpoint of its own"):
        limited(limited.init(), batch)
    whole = ft.remat(budget=1.0)(step)
    whole(whole.init(), batch)
