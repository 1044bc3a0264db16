"""Hostile names of files and leaves: bytes that are not UTF-8, and control characters of terminals."""

import os
import re

import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import __main__ as command
from ftrain.errors import CheckpointError, StructureError

WORST = os.fsdecode(b"\xff\x1b[2J")
SHOWN = r"\\udcff\\x1b\[2J"


def save(path, step=1):
    with ft.Checkpoints(path, every=1) as checkpoints:
        checkpoints.save(step, {"state": {"x": torch.ones(3)}})
    return checkpoints


def test_file_names_that_are_not_text_are_shown_escaped(tmp_path, capsysbinary):
    path = save(tmp_path).path(1)
    (tmp_path / WORST).mkdir()
    save(tmp_path, 2)
    (path / WORST).touch()
    with pytest.raises(CheckpointError, match=SHOWN):
        checkpoint.verify(path)
    assert command.main(["verify", str(path)]) == 1
    output = capsysbinary.readouterr().out
    assert re.search(SHOWN.encode(), output)
    assert b"\x1b" not in output


def test_names_in_a_checkpoint_cannot_write_on_a_terminal(tmp_path, capsysbinary):
    hostile = "weight\x1b]0;title\x07\r\n\u202egone"
    for number, value in enumerate((1.0, 2.0)):
        checkpoint.save(tmp_path / str(number), {"\x9b2Jparams": {hostile: torch.full((2,), value), "text": hostile}})
    assert command.main(["inspect", str(tmp_path / "0")]) == 0
    assert command.main(["diff", str(tmp_path / "0"), str(tmp_path / "1")]) == 1
    file = tmp_path / "0" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert command.main(["verify", str(tmp_path / "0")]) == 1
    with pytest.raises(CheckpointError) as damaged:
        checkpoint.load(tmp_path / "0")
    with pytest.raises(StructureError) as different:
        checkpoint.load(tmp_path / "1", like={"y": torch.ones(2)})
    output = capsysbinary.readouterr().out.decode() + str(damaged.value) + str(different.value)
    assert output.count(r"weight\x1b]0;title\x07\r\n\u202egone") >= 5
    assert all(letter.isprintable() or letter == "\n" for letter in output)


def test_a_path_that_the_file_system_cannot_encode_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"Checkpoints: '.*\\ud800' cannot be used: .*surrogates not allowed"):
        save(tmp_path / "\ud800")
