"""Results of a loss on ranks: buffers that are not finite or change again, and weights that are refused."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from tests.parallel import models
from tests.parallel.ranks import run


class Extremes(nn.Module):
    """A layer with buffers that are not finite: always, at first, and in the second of two calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(5, 3, dtype=torch.float64), 0
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("mean", torch.tensor(torch.nan, dtype=torch.float64))
        self.register_buffer("least", torch.tensor(torch.inf))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.mean = x.mean()
        self.least = torch.minimum(self.least, torch.tensor(2.0))
        self.last = torch.tensor(torch.inf if self.calls == 2 else 1.0)
        return self.layer(x)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_buffers_that_are_not_finite_are_those_of_one_rank(size):
    def rank(_):
        loss = ft.from_module(Extremes(), models.plain_loss)
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), 0))
        state, steps = step.init(), []
        for batch in models.batches(3, 7):
            state, _ = step(state, batch)
            steps.append((batch["x"].mean(), state.buffers))
        return steps

    for steps in run(size, rank):
        for number, (mean, buffers) in enumerate(steps):
            assert torch.equal(buffers["mask"], torch.full((2, 2), -torch.inf).triu(1))
            torch.testing.assert_close(buffers["mean"], mean, rtol=1e-12, atol=1e-12)
            assert buffers["least"] == 2.0
            assert buffers["last"] == (torch.inf if number == 1 else 1.0)


@pytest.mark.parametrize(("size", "level"), [(1, 0), (2, 0), (2, 3)])
def test_a_weight_that_depends_on_the_parameters_is_an_error_on_ranks_too(size, level):
    def criterion(model, batch):
        outputs = model(batch["x"])
        return ft.Mean(outputs.square().sum(), outputs.abs().sum())

    def rank(_):
        with pytest.raises(LossError, match=r"criterion\(Model\): the weight of the Mean depends on the parameters"):
            models.train(models.step_of(ft.sharded(ft.parallel.mesh(), level), criterion=criterion))

    run(size, rank)


class Recomputed(nn.Module):
    """A layer with a running mean, which torch's checkpoint changes again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def _outputs(self, x):
        outputs = self.layer(x)
        self.mean.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return outputs.tanh()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self._outputs, x, use_reentrant=False)


@pytest.mark.parametrize("level", [0, 3])
def test_a_buffer_that_the_backward_pass_changes_again_is_that_of_one_rank(level):
    def rank(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), level), model=Recomputed, criterion=models.plain_loss)
        return models.train(step)[0].buffers["mean"]

    (expected,) = run(1, rank)
    for mean in run(2, rank):
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("more", [(), (ft.donated(),)], ids=["plain", "donated"])
def test_a_buffer_that_the_backward_pass_changes_is_an_error_with_updates_in_that_pass(more):
    """The buffers are averaged over ranks before the backward pass."""

    def rank(_):
        wrappers = ft.update_in_backward(), ft.sharded(ft.parallel.mesh(), 0), *more
        step = models.step_of(*wrappers, model=Recomputed, criterion=models.plain_loss)
        with pytest.raises(LossError, match=r"the backward pass changes the buffer mean, .* use ft\.remat\(\)"):
            models.train(step)

    run(2, rank)
