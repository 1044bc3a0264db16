"""`python -m ftrain.checkpoint`: inspect, verify and diff."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import __main__ as command
from tests.checkpoint.trained_nets import trained


def test_inspect_shows_the_names_shapes_and_sizes_of_tensors(tmp_path, capsys):
    checkpoint.save(tmp_path / "a", trained(), step=2)
    assert command.main(["inspect", str(tmp_path / "a")]) == 0
    output = capsys.readouterr().out
    assert "params.0.weight" in output
    assert "float32[8, 4]  128 B" in output


def test_verify_names_the_damaged_file_or_says_that_there_is_no_checkpoint(tmp_path, capsys):
    checkpoint.save(tmp_path / "a", trained())
    assert command.main(["verify", str(tmp_path / "a")]) == 0
    file = tmp_path / "a" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert command.main(["verify", str(tmp_path / "a")]) == 1
    assert "state.safetensors" in capsys.readouterr().out
    assert command.main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith(": there is no checkpoint, which is a directory with a MANIFEST.json\n")


def test_diff_counts_the_elements_that_differ_of_two_checkpoints_or_two_runs(tmp_path, capsys):
    states = {"a": trained(), "b": trained(steps=3)}
    for name, state in states.items():
        checkpoint.save(tmp_path / name, state)
        with ft.Checkpoints(tmp_path / "runs" / name, every=1) as checkpoints:
            checkpoints.save(2, {"state": state}, wait=True)
    assert command.main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    capsys.readouterr()
    for folder in (tmp_path, tmp_path / "runs"):
        assert command.main(["diff", str(folder / "a"), str(folder / "b")]) == 1
        output = capsys.readouterr().out
        assert "params.0.weight: 32 of 32 elements differ" in output
        assert "rng" not in output


@pytest.mark.parametrize(
    ("first", "second", "dtype", "largest"),
    [
        ([1.0, float("nan"), 3.0], [1.5, float("nan"), 3.0], torch.float32, "0.5"),
        ([1.0, -float("inf")], [3.0, -float("inf")], torch.float32, "2"),
        ([1.0, 2.0], [1.0, float("nan")], torch.float32, "inf"),
        ([float("inf")], [-float("inf")], torch.float32, "inf"),
        ([2**62 + 1, 0], [2**62, 0], torch.int64, "1"),
        ([2**63 - 1], [-(2**63)], torch.int64, "1.84e+19"),
        ([True, False], [True, True], torch.bool, "1"),
        ([1 + 2j], [1 + 5j], torch.complex64, "3"),
    ],
)
def test_diff_shows_the_largest_difference_of_the_elements_that_differ(tmp_path, capsys, first, second, dtype, largest):
    for name, values in {"a": first, "b": second}.items():
        checkpoint.save(tmp_path / name, {"x": torch.tensor(values, dtype=dtype)})
    assert command.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out == f"x: 1 of {len(first)} elements differ, by up to {largest}\n"


def test_inspect_shows_leaves_that_are_not_tensors(tmp_path, capsys):
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2), "n": float("nan")})
    assert command.main(["inspect", str(tmp_path / "a")]) == 0
    output = capsys.readouterr().out
    assert "x  float32[2]  8 B" in output
    assert "n  nan" in output


@pytest.mark.parametrize("command", [["ftrain.checkpoint", "verify"], ["ftrain", "doctor", "cpu"]])
def test_a_command_whose_output_nobody_reads_ends_without_a_traceback(command, tmp_path):
    """As in `command | head -1`, after `head` has ended. Here the pipe has no reader from the start."""
    checkpoint.save(tmp_path / "a", {"x": torch.ones(3)})
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [str(tmp_path / "a")] if command[-1] == "verify" else []
    run = [sys.executable, "-m", *command, *arguments]
    process = subprocess.run(run, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (process.returncode, process.stderr) == (-signal.SIGPIPE, "")
