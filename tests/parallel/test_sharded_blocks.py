"""Blocks that `torch.compile` compiles, on ranks: the results of uncompiled ones, at every level."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError
from tests.faults.forks import quiet_forks
from tests.parallel import models
from tests.parallel.processes import started
from tests.parallel.ranks import run
from tests.parallel.results import assert_histories_near, assert_leaves_near

BLOCKS = ft.compiled(lowering="blocks", backend="aot_eager")
STACK = ft.accumulate(2), ft.remat(), ft.ema(0.8), ft.clip(0.1)
LEVELS = range(4)


class Quiet(models.Model):
    """Draws nothing: on ranks, blocks that draw run uncompiled."""

    def __init__(self):
        super().__init__(blocks=3)
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0


def training(tell, rank, directory):
    """Train at each level, with and without wrappers around the blocks; save the states and the number of graphs."""
    from torch._dynamo.utils import counters

    counters.clear()  # The process is a copy of that of the tests.
    mesh, results = ft.parallel.mesh(), {}
    for level in LEVELS:
        for wrappers in ((), STACK):
            step = models.step_of(*wrappers, ft.sharded(mesh, level), BLOCKS, model=Quiet)
            state, history = models.train(step)
            results[level, len(wrappers)] = state.params, history
    torch.save((results, counters["stats"]["unique_graphs"]), directory / f"{rank}.pt")


# Dynamo reads the .grad of every tensor it traces, which makes torch warn.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@quiet_forks
def test_compiled_blocks_on_ranks_equal_one_rank_without_a_mesh(tmp_path):
    with started(2, training, tmp_path) as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0]
    for rank in range(2):
        results, num_graphs = torch.load(tmp_path / f"{rank}.pt")
        assert num_graphs == len(results)  # All blocks of a step are one graph.
        for (_, num_wrappers), (params, history) in results.items():
            wrappers = STACK if num_wrappers else ()
            expected, expected_history = models.train(models.step_of(*wrappers, model=Quiet))
            assert_leaves_near(params, expected.params)
            assert_histories_near(history, expected_history)


def test_level_3_with_autocast_needs_gathered_parameters_in_16_bits():
    def rank(_):
        mesh = ft.parallel.mesh()
        with pytest.raises(ComposeError, match=r"16-bit copies of the gathered parameters.*gather='amp'"):
            models.step_of(ft.with_amp("bf16"), ft.sharded(mesh, 3), BLOCKS, model=Quiet)
        models.step_of(ft.with_amp("bf16"), ft.sharded(mesh, 3, gather="amp"), BLOCKS, model=Quiet)
        models.step_of(ft.with_amp("bf16"), ft.sharded(mesh, 2), BLOCKS, model=Quiet)

    run(2, rank)
