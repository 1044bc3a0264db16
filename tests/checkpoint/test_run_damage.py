"""The checkpoints of a run: damaged, half-written and unreadable ones."""

import errno
import os
import shutil

import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import saving_on_ranks
from ftrain.checkpoint.model_files import STATE
from ftrain.errors import CheckpointError, StructureError
from tests.checkpoint.runs import damage, fill, parts_of


def test_nothing_is_removed_when_the_new_checkpoint_is_not_whole(tmp_path, monkeypatch):
    write = saving_on_ranks.write

    def write_wrong_byte(path, *rest):
        write(path, *rest)
        file = path / "state.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"!")

    fill(tmp_path, [1], keep=1)
    monkeypatch.setattr(saving_on_ranks, "write", write_wrong_byte)
    with (
        pytest.raises(CheckpointError, match="not those that were saved"),
        ft.Checkpoints(tmp_path, every=1, keep=1) as checkpoints,
    ):
        checkpoints.save(2, parts_of(2))
    assert checkpoints.steps() == [1, 2]
    with pytest.warns(UserWarning, match="going back to step 1"):
        assert checkpoints.latest().step == 1


def test_damaged_checkpoints_are_passed_over_with_a_warning_and_renamed(tmp_path):
    checkpoints = fill(tmp_path, [1, 2, 3])
    damage(checkpoints.path(3))
    damage(checkpoints.path(2))
    with pytest.warns(UserWarning, match=r"(?s)step 1.*0003.*0002.*cut off"):
        assert checkpoints.latest().step == 1
    # The resumed run saves step 2 again.
    assert fill(tmp_path, [2]).steps() == [1, 2, 3]
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("damaged-step-000000000002")]) == 1
    checkpoint.verify(checkpoints.path(2))
    for step in (1, 2, 3):
        (checkpoints.path(step) / "MANIFEST.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint of it can be read.*0003.*0002.*0001"):
        checkpoints.latest()


def test_hidden_files_of_other_programs_are_no_damage(tmp_path):
    path = fill(tmp_path, [1]).path(1)
    (path / ".DS_Store").write_bytes(b"\0")
    (path / ".ipynb_checkpoints").mkdir()
    (path / ".ipynb_checkpoints" / "MANIFEST-checkpoint.json").write_text("{}")
    checkpoint.verify(path)
    assert fill(tmp_path, [1, 2], keep=1).steps() == [2]


def test_damaged_checkpoints_do_not_push_out_those_that_are_whole(tmp_path):
    checkpoints = fill(tmp_path, [1, 2, 3, 4], keep=4)
    damage(checkpoints.path(3))
    damage(checkpoints.path(4))
    with pytest.warns(UserWarning, match="going back to step 2"):
        checkpoints.latest()
    fill(tmp_path, [3], keep=1)
    assert checkpoints.steps() == [3, 4]
    checkpoint.verify(checkpoints.path(3))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_replacement_that_was_interrupted_is_finished_or_undone(damaged, tmp_path):
    checkpoints = fill(tmp_path, [1])
    with checkpoints:
        shutil.copytree(checkpoints.path(1), tmp_path / "step-000000000001.new")
        shutil.rmtree(checkpoints.path(1))
        # A reader finds the new one under its temporary name.
        assert ft.Checkpoints(tmp_path, every=1).steps() == [1]
        assert ft.Checkpoints(tmp_path, every=1).latest().step == 1
    with checkpoints:
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000000000001"]
        shutil.copytree(checkpoints.path(1), tmp_path / "step-000000000001.new")
        if damaged:
            damage(tmp_path / "step-000000000001.new")
    with checkpoints:
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000000000001"]
        assert checkpoints.latest().step == 1


def test_another_structure_is_no_damage(tmp_path):
    checkpoints = fill(tmp_path, [1])
    with pytest.raises(StructureError, match=r"x: found float32\[3\], needs float32\[4\]"):
        checkpoints.latest({"state": {"x": torch.zeros(4)}})


def test_a_checkpoint_that_a_run_removes_while_it_is_read_is_not_taken_for_damaged(tmp_path, recwarn):
    reader, removed = fill(tmp_path, [1], keep=1), []
    with ft.Checkpoints(tmp_path, every=1, keep=1) as writer:

        def accept(loaded):
            # While step 1 is read, the run saves step 2 and removes step 1.
            if not removed:
                removed.append(loaded.step)
                writer.save(2, parts_of(2), wait=True)
                raise CheckpointError("a file is missing")

        assert reader.latest(accept=accept).step == 2
    assert removed == [1]
    assert not recwarn


@pytest.mark.parametrize(
    "call",
    [
        lambda directory: ft.Checkpoints(directory, every=1).latest(),
        lambda directory: ft.Checkpoints(directory, every=1, best="loss").latest(best=True),
        lambda directory: fill(directory, [2]),
    ],
    ids=["latest", "best", "save"],
)
def test_a_checkpoint_without_permission_to_read_is_not_taken_for_damaged(call, tmp_path, monkeypatch):
    checkpoints, os_open = fill(tmp_path, [1, 2]), os.open

    def refuse(path, *rest):
        if str(path).endswith("step-000000000002/MANIFEST.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return os_open(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"step-000000000002: cannot be read: .*; it may be intact: let this"):
        call(tmp_path)
    assert not [*tmp_path.glob("damaged-*")]
    monkeypatch.undo()
    assert checkpoints.latest().step == 2


def test_a_best_checkpoint_that_is_damaged_is_named_and_the_newest_can_be_loaded(tmp_path):
    fill(tmp_path, [1, 2], {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    (tmp_path / "step-000000000001" / STATE).write_bytes(b"")
    checkpoints = ft.Checkpoints(tmp_path, every=1, best="loss")
    with pytest.raises(CheckpointError, match=r"the best checkpoint .* cannot be read; .*latest\(\):\n.*0001"):
        checkpoints.latest(best=True)
    assert checkpoints.latest().step == 2
