"""BatchNorm over the examples of all ranks is BatchNorm on one."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, LossError
from tests.bits import assert_same_bits
from tests.parallel import models
from tests.parallel.ranks import run, seeded
from tests.parallel.results import assert_near


class Images(nn.Module):
    """Convolution, BatchNorm2d in a block, and BatchNorm1d without parameters and with a cumulative average."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.Dropout(0.1))
            for _ in range(2)
        )
        self.cumulative = nn.BatchNorm1d(2, momentum=None, affine=False)
        self.untracked = nn.BatchNorm1d(2, track_running_stats=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.untracked(self.cumulative(x.mean((2, 3))) ** 2)


def criterion(model, batch):
    """Return the mean over weights, of which some examples have none."""
    outputs = (model(batch["x"]) - batch["y"]).square().sum(1)
    return ft.Mean((outputs * batch["weight"]).sum(), batch["weight"].sum())


def images(count=3, length=6):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x, y, weight = (torch.randn(length, *shape, generator=generator).double() for shape in ((2, 3, 3), (2,), ()))
        # The mean of the examples is far from 0: a variance as a difference of squares would lose digits.
        yield {"x": x + 10.0, "y": y, "weight": weight.abs() * torch.arange(length).ge(2)}


def trained(size, level, wrappers=tuple, mesh=None, synced=True):
    def rank(_):
        with seeded(0):
            module = Images().double()
        step = ft.train_step(ft.from_module(module, criterion), ft.optim.adamw(1e-2))
        sync = [ft.sync_batch_norm()] if synced else []
        step = ft.compose(step, *wrappers(), *sync, ft.sharded(ft.parallel.mesh(**(mesh or {})), level))
        return models.train(step, images())

    return run(size, rank)


@pytest.mark.parametrize(("size", "level"), [(2, 0), (4, 1), (5, 3), (8, 2)])
def test_ranks_normalise_as_one_does_also_those_without_examples(size, level):
    """Six examples: four ranks have one or two each, and of eight two have none."""
    (expected,) = trained(1, 0, synced=False)
    assert_near(trained(size, level), expected)


RUNNING_AGAIN = {
    "accumulate": lambda: [ft.accumulate(2)],
    "remat": lambda: [ft.remat()],
    "remat in the backward pass of an update": lambda: [ft.remat(), ft.update_in_backward()],
    "sam": lambda: [ft.sam(0.05)],
}


@pytest.mark.parametrize("name", RUNNING_AGAIN)
def test_beside_wrappers_that_run_the_model_again_ranks_normalise_as_one_does(name):
    make = RUNNING_AGAIN[name]
    (expected,) = trained(1, 0, make, synced=False)
    assert_near(trained(3, 3, make), expected)


def test_ranks_with_copies_of_a_state_normalise_as_one_does():
    (expected,) = trained(1, 0, synced=False)
    assert_near(trained(4, 3, mesh={"replicate": 2}), expected)


def test_on_one_rank_it_is_batch_norm_to_the_bit():
    (plain, _), (synced, _) = trained(1, 3, synced=False)[0], trained(1, 3)[0]
    assert_same_bits(synced, plain)


def test_one_value_per_channel_on_all_ranks_is_an_error_on_each():
    """The variance of one value would make the running variance NaN. Without ranks torch raises a ValueError."""

    def rank(_):
        loss_fn = ft.from_module(nn.Sequential(nn.BatchNorm1d(2)), lambda model, batch: model(batch).square().mean())
        step = ft.train_step(loss_fn, ft.optim.sgd(0.1))
        step = ft.compose(step, ft.sync_batch_norm(), ft.sharded(ft.parallel.mesh()))
        with pytest.raises(LossError, match=r"BatchNorm1d\(2.*\) gets one value per channel"):
            step(step.init(), torch.ones(1, 2))

    run(2, rank)


def test_an_evaluation_normalises_by_the_running_statistics():
    def rank(_):
        module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
        loss_fn = ft.from_module(module, models.plain_loss)
        step = ft.compose(
            ft.train_step(loss_fn, ft.optim.sgd(0.1)), ft.sync_batch_norm(), ft.sharded(ft.parallel.mesh(), 0)
        )
        state, _ = step(step.init(), next(models.batches()))
        module = ft.to_module(module, state).eval()
        batch = next(models.batches())
        return float(ft.eval_step(step.loss)(state, batch)["loss"]), models.plain_loss(module, batch).item()

    for actual, expected in run(3, rank):
        assert actual == pytest.approx(expected, rel=1e-12)


def test_a_model_without_batch_norm_or_with_a_subclass_of_it_is_refused():
    class Scaled(nn.BatchNorm1d):
        def forward(self, x):
            return 2 * super().forward(x)

    for module, text in ((nn.Linear(5, 3), "no torch.nn.BatchNorm"), (nn.Sequential(Scaled(3)), "0 is a Scaled")):
        with pytest.raises(ComposeError, match=text):
            ft.sync_batch_norm()(ft.train_step(ft.from_module(module, models.plain_loss), ft.optim.sgd(0.1)))
