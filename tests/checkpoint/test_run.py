"""The checkpoints of a run: which are kept, which is loaded, and which process may write."""

import errno
import os
import re
import shutil
import threading

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import files
from ftrain.checkpoint import saving_on_ranks as saving_runs
from ftrain.checkpoint.model_files import STATE
from ftrain.errors import CheckpointError, OptionError, StructureError


def tree(value):
    return {"state": {"x": torch.full((3,), float(value))}, "run": {"step": value}}


def fill(directory, steps, metrics=None, **options):
    with ft.Checkpoints(directory, every=1, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, tree(step), metrics=(metrics or {}).get(step))
    return ft.Checkpoints(directory, every=1, **options)


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def async_(request):
    return request.param


def test_the_newest_stay(tmp_path, async_):
    checkpoints = fill(tmp_path, range(1, 8), keep=3, async_=async_)
    assert checkpoints.steps() == [5, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", *(f"step-{step:012d}" for step in (5, 6, 7))]
    actual = checkpoints.latest()
    assert (actual.step, actual.parts["run"]) == (7, {"step": 7})
    assert repr(actual) == f"LoadedCheckpoint(step=7, path={str(actual.path)!r}, parts={[*actual.parts]})"


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("min", [3.0, 1.0, 2.0, 4.0, 5.0], [2, 5]),
        ("max", [3.0, 1.0, 2.0, 4.0, 0.0], [4, 5]),
        ("min", [3.0, float("nan"), float("-inf"), 4.0, 5.0], [1, 5]),
        ("max", [3.0, float("nan"), float("inf"), 4.0, 2.0], [4, 5]),
        ("min", [1.0, 1.0, 1.0, 1.0, 1.0], [1, 5]),
        ("min", [None, 7, None, None, None], [2, 5]),
    ],
)
def test_the_best_stays(mode, values, expected, tmp_path):
    metrics = {step: {"eval_value": value} for step, value in enumerate(values, 1) if value is not None}
    # The second context reads from the disk which one is the best.
    fill(tmp_path, [1, 2, 3], metrics, keep=1, best="eval_value", mode=mode)
    checkpoints = fill(tmp_path, [4, 5], metrics, keep=1, best="eval_value", mode=mode)
    assert checkpoints.steps() == expected
    actual = checkpoints.latest(best=True)
    assert actual.step == expected[0]


def test_loading_the_best_needs_its_metric(tmp_path):
    checkpoints = fill(tmp_path, [1, 2], best="eval_loss")
    with pytest.raises(CheckpointError, match="eval_loss"):
        checkpoints.latest(best=True)
    with pytest.raises(OptionError, match="best="):
        fill(tmp_path / "b", [1]).latest(best=True)


def test_pinned_ones_stay(tmp_path):
    checkpoints = fill(tmp_path, [1, 2], keep=2)
    checkpoints.pin(1)
    assert fill(tmp_path, [3, 4, 5], keep=2).steps() == [1, 4, 5]
    with pytest.raises(CheckpointError, match="no checkpoint of step 9"):
        checkpoints.pin(9)


def test_a_context_is_not_opened_twice(tmp_path, async_):
    with ft.Checkpoints(tmp_path, every=1, async_=async_) as checkpoints:
        with pytest.raises(CheckpointError, match="open already"), checkpoints:
            pass
        # The first context still holds the lock, and saves.
        message = "is being written to by another run in this process, .*; give each run one of its own"
        with pytest.raises(CheckpointError, match=message), ft.Checkpoints(tmp_path, every=1):
            pass
        checkpoints.save(1, tree(1))
    with checkpoints:
        assert checkpoints.steps() == [1]


def test_the_state_is_copied_at_the_call(tmp_path, monkeypatch):
    has_begun, may_write = threading.Event(), threading.Event()
    write = saving_runs.write

    def slow(*args):
        has_begun.set()
        may_write.wait(10)
        write(*args)

    monkeypatch.setattr(saving_runs, "write", slow)
    trees = tree(1)
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, trees)
        assert has_begun.wait(10)
        trees["state"]["x"].zero_()
        trees["run"]["step"] = 0
        assert checkpoints.steps() == []
        may_write.set()
    actual = ft.Checkpoints(tmp_path, every=1).latest()
    assert actual.parts["state"]["x"].tolist() == [1, 1, 1]
    assert actual.parts["run"] == {"step": 1}


def test_the_memory_of_copies_is_reused(tmp_path):
    trees = {"state": {"x": torch.randn(1000), "t": torch.randn(3, 4).T, "tied": None}}
    trees["state"]["tied"] = trees["state"]["x"]
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        addresses = []
        for step in (1, 2):
            checkpoints.save(step, trees, wait=True)
            addresses.append([buffer.data_ptr() for buffer in checkpoints._buffers])
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) == 2
    actual = checkpoints.latest().parts["state"]
    assert actual["tied"] is actual["x"]
    assert torch.equal(actual["t"], trees["state"]["t"])


def test_check_raises_the_error_of_a_save_in_the_background_once(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, tree(1), wait=True)
        monkeypatch.setattr(files, "write", full)
        checkpoints.save(2, tree(2))
        checkpoints._pending.exception()
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.check()
        checkpoints.check()
        monkeypatch.undo()
        checkpoints.save(3, tree(3))
    assert checkpoints.steps() == [1, 3]


def test_nothing_is_removed_when_the_new_one_is_not_whole(tmp_path, monkeypatch):
    write = saving_runs.write

    def torn(path, *rest):
        write(path, *rest)
        file = path / "state.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"!")

    fill(tmp_path, [1], keep=1)
    monkeypatch.setattr(saving_runs, "write", torn)
    with (
        pytest.raises(CheckpointError, match="not those that were saved"),
        ft.Checkpoints(tmp_path, every=1, keep=1) as checkpoints,
    ):
        checkpoints.save(2, tree(2))
    assert checkpoints.steps() == [1, 2]
    with pytest.warns(UserWarning, match="going back to step 1"):
        assert checkpoints.latest().step == 1


def damage(path):
    file = path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


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
        shutil.rmtree(checkpoints.path(step) / "params", ignore_errors=True)
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


def test_damaged_ones_do_not_push_out_those_that_are_whole(tmp_path):
    checkpoints = fill(tmp_path, [1, 2, 3, 4], keep=4)
    damage(checkpoints.path(3))
    damage(checkpoints.path(4))
    with pytest.warns(UserWarning, match="going back to step 2"):
        checkpoints.latest()
    fill(tmp_path, [3], keep=1)
    assert checkpoints.steps() == [3, 4]
    checkpoint.verify(checkpoints.path(3))


def test_an_intact_checkpoint_with_the_same_content_is_not_replaced(tmp_path):
    checkpoints = fill(tmp_path, [1])
    before = (checkpoints.path(1) / "MANIFEST.json").read_bytes()
    fill(tmp_path, [1])
    assert (checkpoints.path(1) / "MANIFEST.json").read_bytes() == before


def test_a_step_of_the_same_run_is_replaced(tmp_path, async_):
    with ft.Checkpoints(tmp_path, every=1, best="loss", async_=async_) as checkpoints:
        checkpoints.save(1, tree(1), metrics={"loss": 1.0})
        checkpoints.save(2, tree(2))
        # First the same state with a metric, then another state.
        checkpoints.save(2, tree(2), metrics={"loss": 0.5})
        checkpoints.wait()
        assert checkpoints.latest(best=True).step == 2
        checkpoints.save(2, tree(5), metrics={"loss": 2.0})
        checkpoints.wait()
        assert checkpoints.latest(best=True).step == 1
    assert checkpoints.latest().parts["state"]["x"].tolist() == [5, 5, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000000000001", "step-000000000002"]


def test_a_step_of_another_run_is_not_replaced(tmp_path):
    before = fill(tmp_path, [1]).latest()
    with (
        pytest.raises(CheckpointError, match=r"step-000000000001 is of another run.*use another directory"),
        ft.Checkpoints(tmp_path, every=1) as checkpoints,
    ):
        checkpoints.save(1, tree(2))
    assert torch.equal(checkpoints.latest().parts["state"]["x"], before.parts["state"]["x"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000000000001"]
    # After loading it, this is the same run.
    with checkpoints:
        checkpoints.latest()
        checkpoints.save(1, tree(2))
    assert checkpoints.latest().parts["run"] == {"step": 2}


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


def test_only_one_process_writes_and_others_may_read(tmp_path):
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, tree(1), wait=True)
        with pytest.raises(CheckpointError, match="is being written to by"), ft.Checkpoints(tmp_path, every=1):
            pass
        assert ft.Checkpoints(tmp_path, every=1).latest().step == 1
    with ft.Checkpoints(tmp_path, every=1):
        pass
    with pytest.raises(CheckpointError, match="use it as a context"):
        ft.Checkpoints(tmp_path, every=1).save(2, tree(2))


def test_a_checkpoint_that_a_run_removes_while_it_is_read_is_not_taken_for_damaged(tmp_path, recwarn):
    reader, removed = fill(tmp_path, [1], keep=1), []
    with ft.Checkpoints(tmp_path, every=1, keep=1) as writer:

        def accept(loaded):
            if not removed:
                removed.append(loaded.step)
                writer.save(2, tree(2), wait=True)
                raise CheckpointError("a file is missing")

        assert reader.latest(accept=accept).step == 2
    assert removed == [1]
    assert not recwarn


def test_the_run_keeps_its_name(tmp_path):
    first = fill(tmp_path, [1, 2])
    again = ft.Checkpoints(tmp_path, every=1)
    again.latest()
    with again:
        again.save(3, tree(3))
    names = {checkpoint.verify(first.path(step)).run for step in (1, 2, 3)}
    assert len(names) == 1
    assert names != {""}


WRONG = [("every", 0), ("keep", 0), ("mode", "least"), ("best", 3), ("texts", "abc"), ("directory", None)]


@pytest.mark.parametrize(("name", "value"), [*WRONG, ("directory", "a\0b")])
def test_wrong_options_are_errors_that_name_them(name, value, tmp_path):
    with pytest.raises(OptionError, match=re.escape(f"Checkpoints: {name} is {value!r}")):
        ft.Checkpoints(**{"directory": tmp_path, "every": 1, name: value})


@pytest.mark.parametrize("call", [checkpoint.load, checkpoint.verify, lambda path: checkpoint.save(path, {})])
def test_an_argument_that_is_not_a_path_is_an_error(call):
    for path in (None, "a\0b", b"a", ""):
        with pytest.raises(OptionError, match=r": path is .*, needs a path as a str or pathlib\.Path"):
            call(path)


def test_save_refuses_a_wrong_step_and_a_wrong_name_of_a_text(tmp_path):
    for step in (-1, "3", True):
        with pytest.raises(OptionError, match="save: step is"):
            checkpoint.save(tmp_path / "a", tree(1), step=step)
    with pytest.raises(OptionError, match="save: texts has the name 1;"):
        checkpoint.save(tmp_path / "a", tree(1), texts={1: "text"})


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
    checkpoints, opened = fill(tmp_path, [1, 2]), os.open

    def refuse(path, *rest):
        if str(path).endswith("step-000000000002/MANIFEST.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"step-000000000002: cannot be read: .*; it may be intact: let this"):
        call(tmp_path)
    assert not [*tmp_path.glob("damaged-*")]
    monkeypatch.undo()
    assert checkpoints.latest().step == 2


def test_a_checkpoint_in_place_of_the_directory_of_a_run_is_refused_and_stays_whole(tmp_path):
    path = fill(tmp_path, [1]).path(1)
    with pytest.raises(CheckpointError, match=r"is a checkpoint, and not the directory of a run; pass .* in, "):
        fill(path, [2])
    ft.checkpoint.verify(path)


def test_the_directory_of_a_run_in_place_of_a_checkpoint_is_named_as_such(tmp_path):
    fill(tmp_path, [1, 2])
    with pytest.raises(CheckpointError, match=r"is the directory of a run, .*step-0+1, step-0+2; pass one of them"):
        ft.checkpoint.load(tmp_path)


@pytest.mark.parametrize("path_kind", ["link", "file"])
def test_a_file_or_broken_link_in_place_of_the_directory_is_an_error(path_kind, tmp_path):
    path = tmp_path / "run"
    path.symlink_to(tmp_path / "not-mounted") if path_kind == "link" else path.touch()
    with pytest.raises(CheckpointError, match=r"run' cannot be used: .*is a file, or a link that leads to nothing"):
        fill(path, [1])


def test_a_directory_without_permission_says_what_to_do(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, *rest):
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(CheckpointError, match=r"\.lock'\. The user of this process .*give it the permission, or use"),
        ft.Checkpoints(tmp_path, every=1),
    ):
        pass


@pytest.mark.parametrize("text", [{"hidden": 8}, b"text", 3])
def test_a_text_that_is_not_a_str_is_refused_before_any_step(text, tmp_path):
    step, records = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1)), []
    checkpoints = ft.Checkpoints(tmp_path / "run", every=1, texts={"params/config.json": text})
    with pytest.raises(OptionError, match=r"save: texts\['params/config\.json'\] is a .*; needs a str"):
        ft.fit(
            step, step.init({"w": torch.ones(2)}), [torch.ones(2)], checkpoints=checkpoints, loggers=[records.append]
        )
    assert not records
    with pytest.raises(OptionError, match="needs a str"):
        checkpoint.save(tmp_path / "a", tree(1), texts={"a": text})
    assert not (tmp_path / "a").exists()


def test_like_of_latest_must_be_trees_by_name(tmp_path):
    checkpoints = fill(tmp_path, [1])
    with pytest.raises(StructureError, match=r"latest: like is a Tensor; needs trees by name: \{'state': state\}"):
        checkpoints.latest(torch.ones(3))


def test_the_best_before_a_step(tmp_path):
    checkpoints = ft.Checkpoints(tmp_path, every=1, keep=9, best="loss")
    with checkpoints:
        for step, loss in enumerate([3.0, 2.0, 1.0], start=1):
            checkpoints.save(step, tree(step), metrics={"loss": loss})
    assert checkpoints.latest(best=True).step == 3
    assert checkpoints.latest(best=True, before=2).step == 2
    with pytest.raises(CheckpointError, match="up to step 0 has a finite loss"):
        checkpoints.latest(best=True, before=0)


def test_a_step_may_be_a_number_of_numpy_or_a_tensor(tmp_path):
    checkpoints = ft.Checkpoints(tmp_path, every=1)
    with checkpoints:
        checkpoints.save(torch.tensor(3), tree(1))
        checkpoints.save(np.int64(4), tree(2))
    assert checkpoints.latest().step == 4
    assert checkpoints.latest(before=torch.tensor(3)).step == 3


@pytest.mark.parametrize("step", ["2", 2.0, True, -1, torch.tensor(2.0)])
def test_a_wrong_step_is_an_error_before_anything_is_written(step, tmp_path):
    checkpoints = ft.Checkpoints(tmp_path, every=1)
    expected = "needs a whole number of at least 0"
    with checkpoints:
        with pytest.raises(OptionError, match=rf"Checkpoints.save: step is .*, {expected}"):
            checkpoints.save(step, tree(1), wait=True)
        with pytest.raises(StructureError, match="parts is a Tensor; needs trees by name"):
            checkpoints.save(1, torch.ones(2))
    assert not checkpoints.steps()
    with pytest.raises(OptionError, match=rf"latest: before is .*, {expected}"):
        checkpoints.latest(before=step)
    with pytest.raises(OptionError, match=rf"path: step is .*, {expected}"):
        checkpoints.path(step)


def test_a_best_one_that_is_damaged_is_named_and_the_newest_can_be_loaded(tmp_path):
    fill(tmp_path, [1, 2], {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    (tmp_path / "step-000000000001" / STATE).write_bytes(b"")
    checkpoints = ft.Checkpoints(tmp_path, every=1, best="loss")
    with pytest.raises(CheckpointError, match=r"the best checkpoint .* cannot be read; .*latest\(\):\n.*0001"):
        checkpoints.latest(best=True)
    assert checkpoints.latest().step == 2
