"""All ranks issue their collectives in the same order: if they did not, they would wait for each other forever.

This is checked on recorded collectives, because ranks that are threads may run collectives that do not match.
"""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ftrain as ft
from ftrain.parallel.mesh import groups
from tests.bits import assert_same_bits
from tests.parallel import models, script
from tests.parallel.collectives import EXCHANGE, Collective, Recorder, require_matched
from tests.parallel.ranks import run


def issued(replicate, shard, level, *wrappers, length=12, optimizer=None):
    """Return for each rank the collectives of `init` and two steps, and the whole last state."""

    def rank(_):
        mesh = ft.parallel.mesh(replicate=replicate)
        step = models.step_of(*wrappers, ft.sharded(mesh, level), optimizer=optimizer and optimizer())
        with Recorder(groups(mesh)) as recorder:
            state, _ = models.train(step, models.batches(2, length))
        return recorder.collectives, state

    return run(replicate * shard, rank)


@pytest.mark.parametrize(
    ("shape", "level", "wrappers", "length"),
    [
        ((1, 2), 0, (), 12),
        ((1, 3), 1, (ft.clip(0.05), ft.skip_nonfinite(3)), 10),
        ((1, 4), 2, (ft.accumulate(2),), 12),
        ((1, 3), 3, (ft.remat(), ft.accumulate(2)), 10),
        ((2, 2), 3, (ft.remat(blocks=["blocks.1"]),), 12),
        pytest.param((1, 4), 3, (ft.accumulate(2), ft.clip(0.05)), 6, marks=pytest.mark.exhaustive),
        ((2, 2), 3, (ft.sam(0.05), ft.accumulate(3)), 9),
    ],
    ids=[
        "level-0",
        "uneven-rows",
        "uneven-rows-accumulate",
        "remat-accumulate-uneven-rows",
        "hybrid-remat-of-one-block",
        "ranks-without-examples",
        "hybrid-sam-accumulate-ranks-without-examples",
    ],
)
def test_all_ranks_issue_the_same_collectives(shape, level, wrappers, length):
    collectives = [of_rank for of_rank, _ in issued(*shape, level, *wrappers, length=length)]
    # At least those of the loss and of the gradient in each step.
    assert len(collectives[0]) >= 2 * 2
    require_matched(collectives, *shape)


@pytest.mark.parametrize(
    ("shape", "level", "optimizer"),
    [
        pytest.param((1, 3), 1, script.optimizer, id="partition"),
        pytest.param((2, 2), 3, script.optimizer, id="hybrid-partition"),
        # Parts of the partition, each alone.
        pytest.param((1, 5), 2, lambda: ft.optim.lamb(0.01), id="lamb", marks=pytest.mark.exhaustive),
        pytest.param((2, 2), 1, lambda: ft.optim.adafactor(0.01), id="hybrid-adafactor", marks=pytest.mark.exhaustive),
        pytest.param(
            (1, 3),
            3,
            lambda: ft.optim.adamw_8bit(0.01, block=4, min_size=1),
            id="adamw_8bit",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_all_ranks_issue_the_same_collectives_for_leaves_that_are_updated_whole(shape, level, optimizer):
    collectives = [of_rank for of_rank, _ in issued(*shape, level, optimizer=optimizer)]
    assert any(collective.operation == EXCHANGE for collective in collectives[0])
    require_matched(collectives, *shape)


def test_the_same_mesh_twice_gives_the_same_collectives_and_bits():
    first, second = (issued(1, 2, 3, ft.remat(), ft.accumulate(2), ft.clip(0.05)) for _ in range(2))
    for (collectives, state), (others, other) in zip(first, second, strict=True):
        assert collectives == others
        assert_same_bits(other, state)


def test_collectives_in_another_order_or_with_other_arguments_do_not_match():
    (collectives, _), *_ = issued(1, 2, 1)
    first, *middle, last = collectives
    require_matched([collectives, collectives], 1, 2)
    for other in ([last, *middle, first], [first, *middle, last._replace(arguments=(7,))]):
        with pytest.raises(AssertionError, match="ranks differ in what they issue"):
            require_matched([collectives, other], 1, 2)


def test_exchanges_in_which_ranks_receive_other_counts_than_are_sent_do_not_match():
    of_ranks = [[Collective(EXCHANGE, "shard", ((5, "float"), *counts))] for counts in ((2, 3, 2, 1), (1, 4, 3, 4))]
    require_matched(of_ranks, 1, 2)
    with pytest.raises(AssertionError, match="ranks differ in what they issue"):
        require_matched([of_ranks[0], [Collective(EXCHANGE, "shard", ((5, "float"), 1, 4, 2, 5))]], 1, 2)


def captured(rank, shape, level, optimizer, *wrappers):
    """Return the collectives of one rank of a mesh in a compiled step; the other ranks do not exist."""
    size = shape[0] * shape[1]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        mesh = ft.parallel.mesh(replicate=shape[0])
        compiled = ft.compiled(lowering="whole", backend="eager")
        sharded = ft.sharded(mesh, level)
        step = models.step_of(*wrappers, sharded, compiled, optimizer=optimizer(), model=models.Small)
        batch = next(models.batches(length=10))  # Microbatches of five: two ranks have three and two of them.
        state, _ = step(step.init(seed=0), batch)
        with Recorder(groups(mesh)) as recorder:
            step(state, batch)
        return recorder.collectives
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "level", "optimizer", "wrappers"),
    [
        ((1, 3), 2, lambda: ft.optim.adamw(0.01), ()),
        ((1, 2), 1, lambda: ft.optim.lamb(0.01), ()),
        ((1, 2), 3, lambda: ft.optim.sgd(0.01), (ft.accumulate(2),)),
    ],
    ids=["uneven-rows", "whole-leaves", "blocks-of-uneven-rows"],
)
def test_the_graphs_of_all_ranks_issue_the_same_collectives(shape, level, optimizer, wrappers):
    collectives = [captured(rank, shape, level, optimizer, *wrappers) for rank in range(shape[0] * shape[1])]
    assert len(collectives[0]) >= 4
    require_matched(collectives, *shape)
