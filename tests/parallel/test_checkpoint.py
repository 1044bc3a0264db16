"""Checkpoints of divided states: the files are those that one rank writes, and any number of ranks reads them."""

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import Checkpoints
from tests.parallel import models
from tests.parallel.ranks import run

MESHES = [(1, 0, {}), (2, 3, {}), (3, 1, {}), (4, 3, {"replicate": 2}), (4, 0, {})]
"""Number of ranks, level, sizes of the mesh."""


def sharded_step(level=3, **mesh):
    return models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh(**mesh), level))


def trained(level=3, count=2, **mesh):
    """Return a step, and a state of it after a few batches."""
    step = sharded_step(level, **mesh)
    state = step.init(seed=5)
    for batch in models.batches(count):
        state, _ = step(state, batch)
    return step, state


def drawn(level=3, **mesh):
    """Return a state of which every leaf is drawn from a seed, so that it is the same on any mesh, to the bit."""
    state = sharded_step(level, **mesh).init(seed=5)
    generator = torch.Generator().manual_seed(0)

    def draw(leaf):
        if not leaf.is_floating_point():
            return leaf
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)

    return ft.parallel.divided(ft.tree.map(draw, ft.parallel.whole(state)), like=state)


def contents(directory):
    """Return the bytes of all files but the manifest, and of the tensors in that."""
    files = {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return {path: data for path, data in files.items() if path.name != "MANIFEST.json"} | {
        "tensors": ft.checkpoint.verify(directory).tensors
    }


def assert_bits(state, expected):
    for name, a, b in zip(ft.tree.leaf_names(expected), ft.tree.leaves(state), ft.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        assert torch.equal(ft.parallel.whole(a), ft.parallel.whole(b)), name


@pytest.mark.parametrize(("size", "level", "mesh"), MESHES)
def test_any_mesh_writes_the_files_of_one_rank_and_reads_them(size, level, mesh, tmp_path):
    def alone(_):
        ft.checkpoint.save(tmp_path / "alone", drawn(0))

    def save_and_load(rank):
        state = drawn(level, **mesh)
        if level or not rank:
            ft.checkpoint.save(tmp_path / "together", state)
        like = sharded_step(level, **mesh).init(seed=6)
        assert_bits(ft.checkpoint.load(tmp_path / "alone", like=like), state)

    run(1, alone)
    run(size, save_and_load)
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


def test_a_run_is_saved_and_goes_on_with_other_ranks(tmp_path):
    """1 -> 4 -> 2 ranks, in the background."""

    def go_on(level, **mesh):
        def rank(_):
            step = sharded_step(level, **mesh)
            with Checkpoints(tmp_path, every=1) as checkpoints:
                newest = checkpoints.latest({"state": step.init(seed=5)})
                state = newest.parts["state"] if newest else step.init(seed=5)
                assert int(state.step) == (newest.step if newest else 0)
                for batch in list(models.batches())[int(state.step) :][:1]:
                    state, _ = step(state, batch)
                    checkpoints.save(int(state.step), {"state": state})
            return ft.parallel.whole(state)

        return rank

    run(1, go_on(3))
    run(4, go_on(2, replicate=2))
    state, _ = run(2, go_on(3))
    reference = run(1, lambda rank: models.train(sharded_step(0)))[0][0]
    torch.testing.assert_close(state.params, reference.params, rtol=1e-12, atol=1e-12)
    assert int(state.step) == 3
