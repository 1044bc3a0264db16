"""The checkpoints of a run: saving in the background, and by one process only."""

import errno
import threading

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import files, saving_on_ranks
from ftrain.errors import CheckpointError
from tests.checkpoint.runs import parts_of, with_and_without_async


@with_and_without_async
def test_a_context_is_not_opened_twice(tmp_path, async_):
    with ft.Checkpoints(tmp_path, every=1, async_=async_) as checkpoints:
        with pytest.raises(CheckpointError, match="open already"), checkpoints:
            pass
        # The first context still holds the lock, and saves.
        message = "is being written to by another run in this process, .*; give each run one of its own"
        with pytest.raises(CheckpointError, match=message), ft.Checkpoints(tmp_path, every=1):
            pass
        checkpoints.save(1, parts_of(1))
    with checkpoints:
        assert checkpoints.steps() == [1]


def test_only_one_process_writes_and_others_may_read(tmp_path):
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, parts_of(1), wait=True)
        with pytest.raises(CheckpointError, match="is being written to by"), ft.Checkpoints(tmp_path, every=1):
            pass
        assert ft.Checkpoints(tmp_path, every=1).latest().step == 1
    with ft.Checkpoints(tmp_path, every=1):
        pass
    with pytest.raises(CheckpointError, match="use it as a context"):
        ft.Checkpoints(tmp_path, every=1).save(2, parts_of(2))


def test_the_state_is_copied_at_the_call(tmp_path, monkeypatch):
    has_begun, may_write = threading.Event(), threading.Event()
    write = saving_on_ranks.write

    def write_later(*args):
        has_begun.set()
        may_write.wait(10)
        write(*args)

    monkeypatch.setattr(saving_on_ranks, "write", write_later)
    parts = parts_of(1)
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, parts)
        assert has_begun.wait(10)
        parts["state"]["x"].zero_()
        parts["run"]["step"] = 0
        assert checkpoints.steps() == []
        may_write.set()
    actual = ft.Checkpoints(tmp_path, every=1).latest()
    assert actual.parts["state"]["x"].tolist() == [1, 1, 1]
    assert actual.parts["run"] == {"step": 1}


def test_the_memory_of_copies_is_reused(tmp_path):
    tensor = torch.randn(1000)
    state = {"x": tensor, "transposed": torch.randn(3, 4).T, "tied": tensor}
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        addresses = []
        for step in (1, 2):
            checkpoints.save(step, {"state": state}, wait=True)
            addresses.append([buffer.data_ptr() for buffer in checkpoints._buffers])
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) == 2
    actual = checkpoints.latest().parts["state"]
    assert actual["tied"] is actual["x"]
    assert torch.equal(actual["transposed"], state["transposed"])


def test_check_raises_the_error_of_a_save_in_the_background_once(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, parts_of(1), wait=True)
        monkeypatch.setattr(files, "write", full)
        checkpoints.save(2, parts_of(2))
        # Wait until the save in the background has ended.
        checkpoints._pending.exception()
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.check()
        checkpoints.check()
        monkeypatch.undo()
        checkpoints.save(3, parts_of(3))
    assert checkpoints.steps() == [1, 3]
