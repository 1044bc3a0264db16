"""Peak memory of training on a CPU: the resident memory of a process of its own."""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from bench.child_process import ChildProcess
from bench.tasks import Entrant, MissingError, Run, Task

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Settings of glibc: freed blocks of 64 KiB or more go back to the system at once and are no longer resident."""
STEPS = 3
"""Number of steps to warm up, and of steps that are measured."""


class Peak(NamedTuple):
    """Peak memory of training, in bytes.

    `total` includes the state and the batch; `within_step` is only what a step adds to what is held between two steps.
    """

    total: float
    within_step: float


def peak(entrant: Entrant, task: Task) -> Peak:
    """Measure the peak memory of training in a new process.

    The process makes a few steps, which compile, and then measures its peak resident memory in a few more. The memory
    that is still resident after model and optimizer are deleted is subtracted, so that libraries do not count.

    Raises:
        MissingError: if the system does not report peak memory, or the entrant lacks what it needs.
    """
    child = ChildProcess(_measure_in_child, entrant, task, environment=MALLOC)
    try:
        return Peak(*child.receive(600.0))
    finally:
        child.close()


def _measure_in_child(pipe: Connection, entrant: Entrant, task: Task) -> None:
    pipe.send(("peak", measure_peak(lambda: entrant.load()(entrant.task(task)))))


def measure_peak(make: Callable[[], Run]) -> Peak:
    """Measure the peak memory of training in this process.

    Raises:
        MissingError: if the system does not report it.
    """
    # This imports the compiler, also for an eager entrant, so that its memory is subtracted for every entrant.
    torch.compiler.reset()
    run = make()
    for _ in range(STEPS):
        run()
    peaks, at_rest = [], []
    for _ in range(STEPS):
        _release()
        _reset_peak()
        at_rest.append(_process_status("VmRSS"))
        run()
        peaks.append(_process_status("VmHWM"))
    del run
    torch.compiler.reset()
    _release()
    highest = statistics.median(peaks)
    return Peak(highest - _process_status("VmRSS"), highest - statistics.median(at_rest))


def peak_increase(function: Callable[[], object]) -> float:
    """Return the peak resident memory while a function runs, minus that before, in bytes.

    Raises:
        MissingError: if the system does not report it.
    """
    _release()
    _reset_peak()
    at_start = _process_status("VmRSS")
    function()
    return float(_process_status("VmHWM") - at_start)


def _release() -> None:
    """Return freed memory to the system."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        raise MissingError("peak memory is read with glibc on Linux only") from None


def _reset_peak() -> None:
    """Set VmHWM to the memory that is resident now ("5" does that, see proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        raise MissingError("this system does not let a process reset its peak memory") from None


def _process_status(name: str) -> int:
    """Return a field of /proc/self/status in bytes, such as VmRSS (resident now) or VmHWM (its peak)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise MissingError(f"/proc/self/status of this system has no {name}")
