"""Checkpoints of divided states: the files are those that one rank writes, and any number of ranks reads them."""

import errno
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import ftrain as ft
from ftrain._torch import store
from ftrain.checkpoint import Checkpoints, directory_lock, files
from ftrain.errors import CheckpointError, RankError
from tests.bits import assert_same_bits
from tests.exhaustive import choose, exhaustive_rows
from tests.parallel import models
from tests.parallel.ranks import run

MESHES = [(1, 0, {}), (2, 3, {}), (3, 1, {}), (4, 3, {"replicate": 2}), (4, 0, {})]
"""Number of ranks, level, sizes of the mesh."""


def sharded_step(level=3, **mesh):
    return models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh(**mesh), level))


def drawn(level=3, **mesh):
    """Return a state whose leaves are all drawn from a seed, so that it has the same bits on any mesh."""
    state = sharded_step(level, **mesh).init(seed=5)
    generator = torch.Generator().manual_seed(0)

    def draw(leaf):
        if not leaf.is_floating_point():
            return leaf
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)

    return ft.parallel.divided(ft.tree.map(draw, ft.parallel.whole(state)), like=state)


def contents(directory):
    """Return the bytes of all files but the manifest, by path, and the entries of tensors in the manifest."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != "MANIFEST.json"]
    bytes_by_path = {path.relative_to(directory): path.read_bytes() for path in paths}
    return bytes_by_path | {"tensors": ft.checkpoint.verify(directory).tensors}


def assert_same_state(state, expected):
    """Check that the leaves of two states are of the same classes, and have the same bits on all ranks together."""
    assert [*map(type, ft.tree.leaves(state))] == [*map(type, ft.tree.leaves(expected))]
    assert_same_bits(ft.parallel.whole(state), ft.parallel.whole(expected))


@pytest.mark.parametrize(("size", "level", "mesh"), MESHES, ids=str)
def test_any_mesh_writes_the_files_of_one_rank_and_reads_them(size, level, mesh, tmp_path):
    def alone(_):
        ft.checkpoint.save(tmp_path / "alone", drawn(0))

    def save_and_load(rank):
        state = drawn(level, **mesh)
        if level or not rank:
            ft.checkpoint.save(tmp_path / "together", state)
        like = sharded_step(level, **mesh).init(seed=6)
        assert_same_state(ft.checkpoint.load(tmp_path / "alone", like=like), state)

    run(1, alone)
    run(size, save_and_load)
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


def test_a_saved_run_continues_on_another_number_of_ranks(tmp_path):
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


@pytest.mark.parametrize(("level", "mesh"), [(3, {"replicate": 2}), (0, {})], ids=str)
def test_ranks_write_frozen_parameters_once_until_one_of_them_changes_on_any_rank(level, mesh, tmp_path):
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh(**mesh), level), trainable=["head.*", "blocks.0.*"])
        state = step.init(seed=5)
        with Checkpoints(tmp_path, every=1, keep=9) as checkpoints:
            for batch in models.batches():
                state, _ = step(state, batch)
                checkpoints.save(int(state.step), {"state": state})
            if level or not number:
                # The last rank has the last rows. At level 0, the first rank writes for all.
                changed = state.frozen["inner.weight"]
                (changed.to_local() if level else changed)[-1:] += number in (0, 3)
            checkpoints.save(4, at_step(state, 4))
            checkpoints.wait()
            return ft.parallel.whole(state)

    state = run(4, rank)[0]
    checkpoints = Checkpoints(tmp_path, every=1)
    numbers = [(checkpoints.path(at) / "params/model-frozen.safetensors").stat().st_ino for at in (1, 2, 3, 4)]
    assert numbers[0] == numbers[1] == numbers[2] != numbers[3]
    for at in (1, 2, 3, 4):
        ft.checkpoint.verify(checkpoints.path(at))
    assert_same_state(ft.checkpoint.load(checkpoints.path(4))["state"], at_step(state, 4)["state"])


def at_step(state, step):
    return {"state": replace(state, step=torch.tensor(step))}


@pytest.mark.parametrize(
    ("function", "failing"),
    [
        *[("write_at", 2), ("opened", 2), ("created", 0), ("sync_directory", 0), ("rename", 0)],
        *exhaustive_rows([("write_at", 0)]),
    ],
)
def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_leaves_the_older_one(
    function, failing, tmp_path, monkeypatch
):
    original, is_full = getattr(files, function), threading.Event()

    def full(*args):
        if is_full.is_set() and dist.get_rank() == failing and not str(args[0]).endswith(".lock"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    def rank(number):
        state = drawn()
        with Checkpoints(tmp_path, every=1, async_=False) as checkpoints:
            checkpoints.save(1, at_step(state, 1))
            dist.barrier()
            is_full.set()
            dist.barrier()
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                checkpoints.save(2, at_step(state, 2))
            assert str(caught.value).startswith(f"rank {failing}: ") == (number != failing)
            dist.barrier()
            is_full.clear()
            dist.barrier()
            assert checkpoints.steps() == [1]
            assert_same_state(checkpoints.latest({"state": state}).parts["state"], at_step(state, 1)["state"])
            checkpoints.save(3, at_step(state, 3))
            assert checkpoints.steps() == [1, 3]

    monkeypatch.setattr(files, function, full)
    run(3, rank)
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("size", choose([1, 2], [2]))
@pytest.mark.parametrize("is_full", [False, True])
def test_after_an_error_of_all_ranks_a_save_in_the_background_is_complete_or_noted_as_failed(
    size, is_full, tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    def rank(_):
        with Checkpoints(tmp_path, every=1) as checkpoints:
            checkpoints.save(1, {"state": torch.ones(1000, 500)})
            raise ArithmeticError

    if is_full:
        monkeypatch.setattr(files, "rename", full)
    with pytest.raises(ArithmeticError) as caught:
        run(size, rank)
    assert Checkpoints(tmp_path, every=1).steps() == ([] if is_full else [1])
    assert ("No space left on device" in str(getattr(caught.value, "__notes__", ""))) == is_full


def test_the_bytes_that_a_rank_has_written_are_compared_with_those_on_the_disk(tmp_path, monkeypatch):
    original = files.write_at

    def flipped(descriptor, data, offset):
        data = bytearray(data)
        data[0] ^= dist.get_rank() == 1
        original(descriptor, memoryview(data), offset)

    def rank(_):
        with pytest.raises(CheckpointError, match=r"\.safetensors: .*: on the disk is not what rank 1 wrote"):
            ft.checkpoint.save(tmp_path / "a", drawn())

    monkeypatch.setattr(files, "write_at", flipped)
    run(3, rank)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Checkpoints. going back to step 1:UserWarning")
@pytest.mark.parametrize(
    "file", ["params/model.safetensors", pytest.param("state.safetensors", marks=pytest.mark.exhaustive)]
)
def test_damage_in_the_part_of_any_rank_is_named_on_every_rank_and_the_older_checkpoint_is_loaded(file, tmp_path):
    def write(_):
        with Checkpoints(tmp_path, every=1) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, at_step(drawn(), step))

    run(2, write)
    damaged = tmp_path / "step-000000000002" / file
    tensors = [item for item in ft.checkpoint.verify(damaged.parents[file.count("/")]).tensors if item.file == file]
    data = damaged.read_bytes()

    def read(number):
        state = drawn()
        with pytest.raises(CheckpointError, match=rf"{file}: .*: the bytes are not those that were saved"):
            ft.checkpoint.load(tmp_path / "step-000000000002", like={"state": state})
        newest = Checkpoints(tmp_path, every=1).latest({"state": state})
        assert newest.step == 1
        assert_same_state(newest.parts["state"], at_step(state, 1)["state"])

    assert len(tensors) > 5
    for end in (len(data) - 1, len(data) - len(data) // 3):
        damaged.write_bytes(data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :])
        run(2, read)


def test_saving_different_states_is_an_error_on_every_rank(tmp_path):
    def rank(number):
        state = drawn()
        other = {"other" if number == 2 else name: leaf for name, leaf in state.params.items()}
        with pytest.raises(CheckpointError, match=r"rank 2 something else in its place"):
            ft.checkpoint.save(tmp_path / "a", replace(state, params=dict(list(other.items())[-1:])))

    run(3, rank)
    assert not list(tmp_path.iterdir())


def test_a_directory_is_written_to_by_one_run_of_many_ranks(tmp_path):
    with Checkpoints(tmp_path, every=1), pytest.raises(CheckpointError, match="is being written to by"):
        run(2, lambda rank: Checkpoints(tmp_path, every=1).__enter__())


def test_ranks_may_have_the_directory_under_different_paths(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")
    original, written = files.opened_to_write, set()

    def recording(path):
        written.add(path.relative_to(tmp_path).parts[0])
        return original(path)

    def rank(number):
        root = tmp_path / ("mounted" if number else "disk")
        step, batches = sharded_step(), list(models.batches())
        ft.fit(
            step, step.init(seed=5), batches, checkpoints=Checkpoints(root / "run", every=1), progress=False, steps=2
        )
        checkpoints = Checkpoints(root / "run", every=1)
        state, _ = ft.fit(step, step.init(), batches, checkpoints=checkpoints, resume="must", progress=False, steps=3)
        ft.checkpoint.save(root / "alone", state)
        assert_same_state(ft.checkpoint.load(root / "alone", like=state), state)
        return checkpoints.steps()

    monkeypatch.setattr(files, "opened_to_write", recording)
    assert run(2, rank) == [[1, 2, 3]] * 2
    assert written == {"disk", "mounted"}


def test_a_directory_that_is_not_the_same_on_all_ranks_is_refused_before_a_step(tmp_path, monkeypatch):
    def rank(number):
        for other in ("missing", "older"):
            step, checkpoints = sharded_step(), Checkpoints(tmp_path / (other if number else "run"), every=1)
            with pytest.raises(CheckpointError, match="is not the directory that the first rank has opened") as caught:
                ft.fit(step, step.init(), [], checkpoints=checkpoints, progress=False)
            assert str(caught.value).startswith("rank 1: ") == (number == 0)
            dist.barrier()

    with Checkpoints(tmp_path / "older", every=1):
        (tmp_path / "copy").write_bytes((tmp_path / "older" / ".lock").read_bytes())
    (tmp_path / "older" / ".lock").write_bytes(
        (tmp_path / "copy").read_bytes().replace(b'"process": ', b'"process": 1')
    )
    monkeypatch.setattr(directory_lock, "PATIENCE", 0.2)
    run(2, rank)
    with Checkpoints(tmp_path / "run", every=1) as checkpoints:
        assert checkpoints.steps() == []


def test_a_rank_that_does_not_come_is_named(tmp_path):
    def rank(number):
        store.set_timeout([], 0.5)
        dist.barrier()
        if number != 1:
            with pytest.raises(RankError, match=r"save: rank 1 did not come within"):
                ft.checkpoint.save(tmp_path / "a", drawn_state[number])

    drawn_state = run(3, lambda rank: drawn())
    run(3, rank)
    assert not list(tmp_path.iterdir())


def test_the_error_of_ranks_that_all_save_whole_tensors_says_that_one_rank_saves_at_level_0(tmp_path):
    notes = []

    def rank(_):
        try:
            ft.checkpoint.save(tmp_path / "a", {"weight": torch.ones(2)})
        except CheckpointError as error:
            notes.extend(error.__notes__)

    run(2, rank)
    (note,) = notes
    assert "at level 0 of ft.sharded" in note
