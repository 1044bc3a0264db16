"""The checkpoints of a run: which are kept, which one is loaded, and which are replaced."""

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import checkpoints as checkpoints_module
from ftrain.checkpoint.reading import read_manifest
from ftrain.errors import CheckpointError, OptionError
from tests.checkpoint.runs import fill, parts_of, with_and_without_async


@with_and_without_async
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


def test_the_metric_of_each_checkpoint_is_read_once_and_again_when_it_is_replaced(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoints_module, "read_manifest", lambda path: read.append(path.name) or read_manifest(path))
    with ft.Checkpoints(tmp_path, every=1, keep=9, best="value") as checkpoints:
        for step, value in enumerate([3.0, 1.0, 2.0, 4.0], 1):
            checkpoints.save(step, parts_of(step), metrics={"value": value}, wait=True)
        assert sorted(read) == [f"step-{step:012d}" for step in (1, 2, 3, 4)]
        checkpoints.keep = 1
        checkpoints.save(4, parts_of(0), metrics={"value": 0.5}, wait=True)
        assert checkpoints.steps() == [4]


def test_loading_the_best_needs_its_metric(tmp_path):
    checkpoints = fill(tmp_path, [1, 2], best="eval_loss")
    with pytest.raises(CheckpointError, match="eval_loss"):
        checkpoints.latest(best=True)
    with pytest.raises(OptionError, match="best="):
        fill(tmp_path / "b", [1]).latest(best=True)


def test_pinned_checkpoints_stay(tmp_path):
    checkpoints = fill(tmp_path, [1, 2], keep=2)
    checkpoints.pin(1)
    assert fill(tmp_path, [3, 4, 5], keep=2).steps() == [1, 4, 5]
    with pytest.raises(CheckpointError, match="no checkpoint of step 9"):
        checkpoints.pin(9)


def test_the_best_before_a_step(tmp_path):
    checkpoints = ft.Checkpoints(tmp_path, every=1, keep=9, best="loss")
    with checkpoints:
        for step, loss in enumerate([3.0, 2.0, 1.0], start=1):
            checkpoints.save(step, parts_of(step), metrics={"loss": loss})
    assert checkpoints.latest(best=True).step == 3
    assert checkpoints.latest(best=True, before=2).step == 2
    with pytest.raises(CheckpointError, match="up to step 0 has a finite loss"):
        checkpoints.latest(best=True, before=0)


def test_a_run_that_loads_a_checkpoint_keeps_its_name(tmp_path):
    fill(tmp_path, [1, 2])
    checkpoints = ft.Checkpoints(tmp_path, every=1)
    checkpoints.latest()
    with checkpoints:
        checkpoints.save(3, parts_of(3))
    names = {checkpoint.verify(checkpoints.path(step)).run for step in (1, 2, 3)}
    assert len(names) == 1
    assert names != {""}


def test_an_intact_checkpoint_with_the_same_content_is_not_replaced(tmp_path):
    checkpoints = fill(tmp_path, [1])
    before = (checkpoints.path(1) / "MANIFEST.json").read_bytes()
    fill(tmp_path, [1])
    assert (checkpoints.path(1) / "MANIFEST.json").read_bytes() == before


@with_and_without_async
def test_a_step_of_the_same_run_is_replaced(tmp_path, async_):
    with ft.Checkpoints(tmp_path, every=1, best="loss", async_=async_) as checkpoints:
        checkpoints.save(1, parts_of(1), metrics={"loss": 1.0})
        checkpoints.save(2, parts_of(2))
        # First the same state with a metric, then another state.
        checkpoints.save(2, parts_of(2), metrics={"loss": 0.5})
        checkpoints.wait()
        assert checkpoints.latest(best=True).step == 2
        checkpoints.save(2, parts_of(5), metrics={"loss": 2.0})
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
        checkpoints.save(1, parts_of(2))
    assert torch.equal(checkpoints.latest().parts["state"]["x"], before.parts["state"]["x"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-000000000001"]
    # After loading it, this is the same run.
    with checkpoints:
        checkpoints.latest()
        checkpoints.save(1, parts_of(2))
    assert checkpoints.latest().parts["run"] == {"step": 2}


def test_a_step_may_be_a_number_of_numpy_or_a_tensor(tmp_path):
    checkpoints = ft.Checkpoints(tmp_path, every=1)
    with checkpoints:
        checkpoints.save(torch.tensor(3), parts_of(1))
        checkpoints.save(np.int64(4), parts_of(2))
    assert checkpoints.latest().step == 4
    assert checkpoints.latest(before=torch.tensor(3)).step == 3
