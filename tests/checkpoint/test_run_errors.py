"""The checkpoints of a run: wrong options, steps, texts and directories are errors."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.errors import CheckpointError, OptionError, StructureError
from tests.checkpoint.runs import fill, parts_of

WRONG = {"every": 0, "keep": 0, "mode": "least", "best": 3, "texts": "abc", "directory": None}


@pytest.mark.parametrize(("name", "value"), [*WRONG.items(), ("directory", "a\0b")])
def test_wrong_options_are_errors_that_name_them(name, value, tmp_path):
    with pytest.raises(OptionError, match=re.escape(f"Checkpoints: {name} is {value!r}")):
        ft.Checkpoints(**{"directory": tmp_path, "every": 1, name: value})


@pytest.mark.parametrize("call", [checkpoint.load, checkpoint.verify, lambda path: checkpoint.save(path, {})])
def test_an_argument_that_is_not_a_path_is_an_error(call):
    for path in (None, "a\0b", b"a", ""):
        with pytest.raises(OptionError, match=r": path is .*, needs a path as a str or pathlib\.Path"):
            call(path)


def test_save_refuses_a_wrong_step_and_a_name_of_a_text_that_is_no_str(tmp_path):
    for step in (-1, "3", True):
        with pytest.raises(OptionError, match="save: step is"):
            checkpoint.save(tmp_path / "a", parts_of(1), step=step)
    with pytest.raises(OptionError, match="save: texts has the name 1;"):
        checkpoint.save(tmp_path / "a", parts_of(1), texts={1: "text"})


def test_a_checkpoint_in_place_of_the_directory_of_a_run_is_refused_and_stays_whole(tmp_path):
    path = fill(tmp_path, [1]).path(1)
    with pytest.raises(CheckpointError, match=r"is a checkpoint, and not the directory of a run; pass .* in, "):
        fill(path, [2])
    ft.checkpoint.verify(path)


def test_the_directory_of_a_run_in_place_of_a_checkpoint_is_named_as_such(tmp_path):
    fill(tmp_path, [1, 2])
    with pytest.raises(CheckpointError, match=r"is the directory of a run, .*step-0+1, step-0+2; pass one of them"):
        ft.checkpoint.load(tmp_path)


def make_broken_link(path):
    path.symlink_to(path.with_name("not-mounted"))


@pytest.mark.parametrize("make", [make_broken_link, Path.touch], ids=["link", "file"])
def test_a_file_or_broken_link_in_place_of_the_directory_is_an_error(make, tmp_path):
    path = tmp_path / "run"
    make(path)
    with pytest.raises(CheckpointError, match=r"run' cannot be used: .*is a file, or a link that leads to nothing"):
        fill(path, [1])


def test_a_directory_without_permission_says_what_to_do(tmp_path, monkeypatch):
    os_open = os.open

    def refuse(path, *rest):
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return os_open(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(CheckpointError, match=r"\.lock'\. The user of this process .*give it the permission, or use"),
        ft.Checkpoints(tmp_path, every=1),
    ):
        pass


@pytest.mark.parametrize("text", [{"hidden": 8}, b"text", 3])
def test_a_text_that_is_not_a_str_is_refused_before_any_step(text, tmp_path):
    batches_seen = []

    def count(state, batch):
        batches_seen.append(batch)
        return state, {}

    checkpoints = ft.Checkpoints(tmp_path / "run", every=1, texts={"params/config.json": text})
    with pytest.raises(OptionError, match=r"save: texts\['params/config\.json'\] is a .*; needs a str"):
        ft.fit(count, {}, [torch.ones(2)], checkpoints=checkpoints, progress=False)
    assert not batches_seen
    with pytest.raises(OptionError, match="needs a str"):
        checkpoint.save(tmp_path / "a", parts_of(1), texts={"a": text})
    assert not (tmp_path / "a").exists()


def test_like_of_latest_must_be_trees_by_name(tmp_path):
    checkpoints = fill(tmp_path, [1])
    with pytest.raises(StructureError, match=r"latest: like is a Tensor; needs trees by name: \{'state': state\}"):
        checkpoints.latest(torch.ones(3))


@pytest.mark.parametrize("step", ["2", 2.0, True, -1, torch.tensor(2.0)])
def test_a_wrong_step_is_an_error_before_anything_is_written(step, tmp_path):
    checkpoints = ft.Checkpoints(tmp_path, every=1)
    expected = "needs a whole number of at least 0"
    with checkpoints:
        with pytest.raises(OptionError, match=rf"Checkpoints.save: step is .*, {expected}"):
            checkpoints.save(step, parts_of(1), wait=True)
        with pytest.raises(StructureError, match="parts is a Tensor; needs trees by name"):
            checkpoints.save(1, torch.ones(2))
    assert not checkpoints.steps()
    with pytest.raises(OptionError, match=rf"latest: before is .*, {expected}"):
        checkpoints.latest(before=step)
    with pytest.raises(OptionError, match=rf"path: step is .*, {expected}"):
        checkpoints.path(step)
