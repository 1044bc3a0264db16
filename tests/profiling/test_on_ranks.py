"""Steps are timed on one rank only: several would run different numbers of steps, and wait for each other forever."""

import pytest

import ftrain as ft
from ftrain.errors import ComposeError
from tests.parallel import models
from tests.parallel.ranks import run

TIMING = {"hints": ft.hints, "ladder": ft.ladder, "tune": ft.tune}


@pytest.mark.parametrize("name", TIMING)
def test_a_step_on_several_ranks_is_refused(name):
    def rank(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        with pytest.raises(ComposeError, match=rf"{name}: the step runs on 2 ranks and cannot be timed there"):
            TIMING[name](step, step.init(), next(models.batches()))

    run(2, rank)


@pytest.mark.parametrize("level", [0, 3])
def test_a_sharded_step_on_one_rank_gets_hints(level):
    def rank(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), level))
        return ft.hints(step, step.init(), next(models.batches()))

    assert run(1, rank)[0] is not None
