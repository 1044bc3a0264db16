"""After an error in the middle of a step no collective is pending, so that torch keeps no memory for it."""

import os
import signal

import pytest
import torch
from torch._C._distributed_c10d import _get_work_registry_size as pending

import ftrain as ft
from tests.faults.forks import quiet_forks
from tests.parallel import models
from tests.parallel.processes import started
from tests.parallel.ranks import run


class Fails(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("on purpose")


def in_forward(model, batch):
    model.blocks[0](model.inner(batch["x"]))
    raise ValueError("on purpose")


def in_backward(model, batch):
    x = Fails.apply(model.blocks[0](model.inner(batch["x"])))
    return (model.head(model.blocks[1](x)) - batch["y"]).square().mean()


@pytest.mark.parametrize(("level", "criterion"), [(3, in_forward), (3, in_backward), (0, in_backward)])
def test_a_step_that_fails_leaves_no_collective_pending(level, criterion):
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), level), criterion=criterion)
        state = step.init(seed=5)
        with pytest.raises(ValueError, match="on purpose"):
            step(state, next(models.batches()))
        return pending()

    assert run(2, rank) == [0, 0]


class Dies(Fails):
    """The identity, in whose backward pass the process ends."""

    @staticmethod
    def backward(ctx, grad):
        os.kill(os.getpid(), signal.SIGKILL)


def beside_a_dead_rank(tell, rank):
    def loss(model, batch):
        mean = in_backward(model, batch)
        return Dies.apply(mean) if rank == 1 else mean

    step = models.step_of(ft.sharded(ft.parallel.mesh(timeout=600), 0), criterion=loss)
    state = step.init(seed=5)
    try:
        step(state, next(models.batches()))
    except Exception as error:
        tell([type(error).__name__, str(error)])


@quiet_forks
def test_a_step_that_fails_beside_a_dead_rank_does_not_wait_for_it_until_the_timeout():
    with started(2, beside_a_dead_rank) as (alive, dead):
        assert alive.receive(patience=60) == ["ValueError", "on purpose"]
        assert dead.wait() == -signal.SIGKILL
