"""All ranks issue their collectives in the same order: if they did not, they would wait for each other forever.

On ranks that are threads, collectives that do not match may meet without an error.
"""

import pytest
import torch

import ftrain as ft
from ftrain.parallel.mesh import groups
from tests.parallel import models
from tests.parallel.collectives import Recorder, digests, require_matched
from tests.parallel.ranks import run


def issued(replicate, shard, level, *wrappers, length=12):
    """Return of each rank the collectives of its initial state and three steps, and its last state, whole."""

    def rank(_):
        mesh = ft.parallel.mesh(replicate=replicate)
        step = models.step_of(*wrappers, ft.sharded(mesh, level))
        with Recorder(groups(mesh)) as recorder:
            state, _ = models.train(step, models.batches(3, length))
        return recorder.collectives, state

    return run(replicate * shard, rank)


@pytest.mark.parametrize(
    ("shape", "level", "wrappers", "length"),
    [
        ((1, 2), 0, (), 12),
        ((1, 3), 1, (ft.clip(0.05), ft.skip_nonfinite(3)), 10),
        ((1, 5), 2, (ft.accumulate(2),), 12),
        ((1, 3), 3, (ft.remat(), ft.accumulate(2)), 10),
        ((2, 2), 3, (ft.remat(blocks=["blocks.1"]),), 12),
        ((1, 8), 3, (ft.accumulate(2), ft.clip(0.05)), 12),
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
    collectives = [each for each, _ in issued(*shape, level, *wrappers, length=length)]
    # At the least the loss and the gradient of each step.
    assert len(collectives[0]) >= 3 * 2
    require_matched([digests(each) for each in collectives], *shape)


def test_the_same_mesh_twice_gives_the_same_collectives_and_bits():
    first, second = (issued(2, 2, 3, ft.remat(), ft.accumulate(2), ft.clip(0.05)) for _ in range(2))
    for (collectives, state), (others, other) in zip(first, second, strict=True):
        assert collectives == others
        assert all(map(torch.equal, ft.tree.leaves(state), ft.tree.leaves(other)))


@pytest.mark.parametrize("what", ["order", "shard"])
def test_ranks_that_issue_something_else_are_seen(what):
    (collectives, _), *_ = issued(1, 2, 1)
    first, *middle, last = collectives
    others = {
        "order": [last, *middle, first],
        "shard": [*middle, last._replace(arguments=(7,))],
    }
    same = {"order": collectives, "shard": [*middle, last]}[what]
    require_matched([digests(same), digests(same)], 1, 2)
    with pytest.raises(AssertionError, match="ranks differ in what they issue"):
        require_matched([digests(same), digests(others[what])], 1, 2)
