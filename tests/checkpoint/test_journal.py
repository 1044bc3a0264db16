"""The history of a run: an append-only file beside the checkpoints; each checkpoint has the length of its part."""

import errno
import json
import math
import os
import shutil

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import __main__ as command
from ftrain.checkpoint import files
from ftrain.checkpoint.journal import ENCODE, NAME, Journal, Mark, check, parse_mark, read
from ftrain.errors import CheckpointError
from tests.training.interrupted_runs import without_times

HARD = [
    {"step": 1, "loss": 0.1, "large": 2**70, "yes": True, "none": None, "text": 'tëxt "\n\ud800'},
    {"nan": math.nan, "infinite": [-math.inf, [1.5, 2]], "zero": -0.0, "tiny": 5e-324},
    {},
    {"complex": 1 - 2j, "bytes": b"\x00\xff", "tuple": (1, (2.5, "x")), "dict": {"tensor": 3, "kind": "dict"}},
]


def written(directory, records, count=None):
    """Write records to a new journal; return the journal and the mark after them."""
    journal = Journal(directory)
    mark, append = journal.prepare_append(records[:count])
    append()
    return journal, mark


def test_records_are_read_as_they_were(tmp_path):
    _, mark = written(tmp_path, HARD)
    records = list(read(tmp_path, mark))
    # As text, since NaN is not equal to itself, and -0.0 is equal to 0.0.
    assert [repr(record) for record in records] == [repr(record) for record in HARD]
    assert parse_mark(mark._asdict()) == mark


def test_only_new_records_are_written(tmp_path, monkeypatch):
    records = [{"step": step, "loss": 1 / step} for step in range(1, 3001)]
    journal, earlier_mark = written(tmp_path, records, 2000)
    sizes, write = [], files.write

    def record_size(descriptor, data):
        sizes.append(len(data))
        write(descriptor, data)

    monkeypatch.setattr(files, "write", record_size)
    mark, append = journal.prepare_append(records)
    append()
    assert sum(sizes) == mark.bytes - earlier_mark.bytes
    assert mark.bytes == (tmp_path / NAME).stat().st_size
    check(tmp_path, earlier_mark)
    check(tmp_path, mark)
    assert list(read(tmp_path, earlier_mark)) == records[:2000]
    assert list(read(tmp_path, mark)) == records


def test_bytes_after_a_mark_are_cut_off_by_the_next_append(tmp_path):
    _, mark = written(tmp_path, HARD[:1])
    journal = Journal(tmp_path)
    for remainder in (b'{"step": 2, "lo', b'{"step": 2}\n' * 3):
        with (tmp_path / NAME).open("ab") as file:
            file.write(remainder)
        journal.continue_after(mark)
        new_mark, append = journal.prepare_append([*HARD[:1], {"step": 2}])
        append()
        assert (tmp_path / NAME).stat().st_size == new_mark.bytes
        assert list(read(tmp_path, new_mark))[1:] == [{"step": 2}]


def test_records_that_could_not_be_written_are_written_by_the_next_append(tmp_path, monkeypatch):
    journal, _ = written(tmp_path, HARD[:1])
    write = files.write

    def full(descriptor, data):
        write(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    _, append = journal.prepare_append(HARD[:3])
    with pytest.raises(CheckpointError, match=rf"{NAME} could not be written: .*No space left"):
        append()
    monkeypatch.undo()
    mark, append = journal.prepare_append(HARD)
    append()
    assert repr(list(read(tmp_path, mark))) == repr(HARD)


def test_every_flipped_bit_is_found(tmp_path):
    _, mark = written(tmp_path, HARD)
    whole = (tmp_path / NAME).read_bytes()
    for index in range(mark.bytes):
        data = bytearray(whole)
        data[index] ^= 1 << index % 8
        (tmp_path / NAME).write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{NAME}: the first {mark.bytes} bytes are not those"):
            check(tmp_path, mark)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda file: file.unlink(), "is missing; it has the history of the run. Copy it"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "it was cut off"),
        (lambda file: (file.unlink(), file.mkdir()), "is not a regular file"),
    ],
    ids=["missing", "cut off", "a directory"],
)
def test_a_file_that_was_harmed_is_named(harm, expected, tmp_path):
    journal, mark = written(tmp_path, HARD)
    harm(tmp_path / NAME)
    for read_or_check in (check, read):
        with pytest.raises(CheckpointError, match=rf"{NAME}: .*{expected}"):
            read_or_check(tmp_path, mark)
    _, append = journal.prepare_append([*HARD, {"step": 9}])
    with pytest.raises(CheckpointError, match=rf"{NAME} could not be written"):
        append()


@pytest.mark.parametrize(
    "record", [{"x": object()}, {"x": {"y": torch.ones(2)}}, {1: 2.0}], ids=["object", "tensor", "name"]
)
def test_records_that_cannot_be_saved_are_refused(record, tmp_path):
    with pytest.raises(CheckpointError, match="save: "):
        Journal(tmp_path).prepare_append([record])


@pytest.mark.parametrize(
    "saved",
    [None, {}, {"order": 1, "tables": []}, {"records": 1, "bytes": -1, "sha256": "0" * 64}, (1, 2, "0" * 64)],
    ids=str,
)
def test_other_saved_values_are_not_taken_for_a_mark(saved):
    assert parse_mark(saved) is None


# In a run


def loss(params, batch):
    return ((batch["x"] @ params["w"] - 1) ** 2).mean()


def train(directory, steps, **options):
    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(4, 3, generator=draw)} for _ in range(5)]
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.125)), ft.clip(1.0))
    checkpoints = ft.Checkpoints(directory, **{"every": 2, "keep": 2, **options})
    return ft.fit(
        step,
        step.init({"w": torch.zeros(3)}, seed=1),
        data,
        steps=steps,
        log_every=1,
        checkpoints=checkpoints,
        progress=False,
    )


def test_the_size_of_a_checkpoint_does_not_grow_with_the_history(tmp_path):
    train(tmp_path, 60, every=20)
    sizes = {
        path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in tmp_path.glob("step-*")
    }
    assert len(sizes) == 2
    assert max(sizes.values()) - min(sizes.values()) < 32


def test_a_save_encodes_only_the_new_records(tmp_path, monkeypatch):
    encoded = []

    def record_step(record):
        encoded.append(record["step"])
        return ENCODE(record)

    monkeypatch.setattr("ftrain.checkpoint.journal.ENCODE", record_step)
    train(tmp_path, 10, every=5)
    train(tmp_path, 200, every=10)
    assert encoded == list(range(1, 201))


def test_the_directory_of_a_run_may_be_moved_and_copied(tmp_path):
    train(tmp_path / "a", 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "c")
    for name in "bc":
        result = train(tmp_path / name, 7)
        assert without_times(result.history) == without_times(train(tmp_path / "whole", 7).history)


def test_after_a_flipped_bit_in_the_newest_records_a_run_goes_back_to_the_checkpoint_before(tmp_path, capsys):
    train(tmp_path, 4)
    file = tmp_path / NAME
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    assert command.main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("whole")
    assert lines[1].startswith("DAMAGED")
    assert NAME in lines[1]
    with pytest.warns(UserWarning, match=rf"going back to step 2(.|\n)*{NAME}"):
        actual = train(tmp_path, 6)
    assert without_times(actual.history) == without_times(train(tmp_path / "whole", 6).history)
    assert command.main(["verify", str(tmp_path)]) == 0


def test_a_run_without_its_history_is_an_error_that_says_how_to_go_on(tmp_path):
    result = train(tmp_path, 4)
    (tmp_path / NAME).unlink()
    with pytest.raises(CheckpointError, match=rf"(?s){NAME}: is missing.*load the state by itself"):
        train(tmp_path, 6)
    state = ft.checkpoint.load(ft.Checkpoints(tmp_path, every=1).path(4))["state"]
    assert torch.equal(state.params["w"], result.state.params["w"])


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
def test_a_history_that_cannot_be_opened_now_is_not_taken_for_damaged(code, tmp_path, monkeypatch):
    train(tmp_path, 4)
    opened, refused = os.open, []

    def refuse_once(path, *rest):
        if str(path).endswith(NAME) and not refused:
            refused.append(path)
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse_once)
    with pytest.raises(CheckpointError, match=rf"{NAME}: cannot be read: .*; it may be intact: let this"):
        train(tmp_path, 6)
    actual = train(tmp_path, 6)
    assert without_times(actual.history) == without_times(train(tmp_path / "whole", 6).history)


def test_lines_are_json(tmp_path):
    history = train(tmp_path, 4).history
    assert [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()] == list(history)


def test_an_empty_history_is_read_and_checked(tmp_path):
    _, mark = written(tmp_path, [])
    assert mark == Mark(0, 0, mark.sha256)
    assert list(read(tmp_path, mark)) == []
    check(tmp_path, mark)
