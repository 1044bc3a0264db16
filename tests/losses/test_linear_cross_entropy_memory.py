"""`linear_cross_entropy` never holds all logits in memory."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS, CLASSES, WIDTH = 1024, 50257, 64
BYTES_OF_GRADIENTS = 4 * (CLASSES * WIDTH + ROWS * WIDTH + WIDTH)
BYTES_OF_LOGITS = 4 * ROWS * CLASSES


def peak_of_tensors(trace):
    """Return the peak bytes of tensors in a trace of the profiler."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    assert events
    events.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate(event["args"]["Bytes"] for event in events))


def measure(folder, lowering):
    """Return the peak bytes of the process, those of tensors, both without gradients, and the losses, by step."""
    command = [sys.executable, "-m", "tests.losses.memory_script", folder, lowering, ROWS, CLASSES, WIDTH]
    root = Path(__file__).parents[2]
    process = subprocess.run([*map(str, command)], cwd=root, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    of_process, losses = zip(*json.loads((folder / "steps.json").read_text()), strict=True)
    of_tensors = [peak_of_tensors(folder / f"{number}.json") for number in range(len(losses))]
    peaks = [[peak - BYTES_OF_GRADIENTS for peak in peaks] for peaks in (of_process, of_tensors)]
    return *peaks, losses


def test_memory_of_an_eager_step(tmp_path):
    of_process, of_tensors, losses = measure(tmp_path, "eager")
    assert of_tensors[0] < BYTES_OF_LOGITS / 3
    assert of_process[0] < BYTES_OF_LOGITS / 2  # More than that of tensors: the libraries have memory of their own.
    # The loss of the logits has them and their gradient in memory.
    assert of_tensors[1] > 1.9 * BYTES_OF_LOGITS
    assert of_process[1] > 1.5 * BYTES_OF_LOGITS  # Beyond the peak of the step before it.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.exhaustive
def test_memory_of_a_compiled_step(tmp_path):
    _, (of_tensors,), _ = measure(tmp_path, "compiled")
    assert of_tensors < BYTES_OF_LOGITS / 3
