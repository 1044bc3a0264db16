"""Peak memory of training: in a process of its own on a CPU, of the allocator on a GPU."""

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

# Large blocks go back to the system as they are freed, so that what is resident is what is alive.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
STEPS = 3


class Peak(NamedTuple):
    """Bytes that training holds at its most, state and batch included, and how many of them only within a step."""

    most: float
    within: float


def peak(entrant: Entrant, task: Task) -> Peak:
    """Return the bytes that training holds at its most.

    The process trains a few steps, which compiles what is compiled, then notes the most that is resident in a few
    more; from that is taken what is resident when all that was trained is dropped, so that libraries and what their
    compilers leave behind do not count.

    Raises:
        MissingError: where the system does not tell, or the entrant lacks what it needs.
    """
    child = ChildProcess(_measured, entrant, task, environment=MALLOC)
    try:
        return Peak(*child.receive(600.0))
    finally:
        child.close()


def _measured(pipe: Connection, entrant: Entrant, task: Task) -> None:
    pipe.send(("peak", measure(lambda: entrant.load()(entrant.task(task)))))


def measure(make: Callable[[], Run]) -> Peak:
    """Return the bytes that training holds in this process at its most.

    Raises:
        MissingError: where the system does not tell.
    """
    # Loads the compiler whoever trains, so that it is in no difference.
    torch.compiler.reset()
    run = make()
    for _ in range(STEPS):
        run()
    peaks, at_rest = [], []
    for _ in range(STEPS):
        _release()
        _forget_peak()
        at_rest.append(_status("VmRSS"))
        run()
        peaks.append(_status("VmHWM"))
    del run
    torch.compiler.reset()
    _release()
    highest = statistics.median(peaks)
    return Peak(highest - _status("VmRSS"), highest - statistics.median(at_rest))


def most_within(function: Callable[[], object]) -> float:
    """Return the bytes that are resident at the most while a function runs, beyond those before it.

    Raises:
        MissingError: where the system does not tell.
    """
    _release()
    _forget_peak()
    at_start = _status("VmRSS")
    function()
    return float(_status("VmHWM") - at_start)


def _release() -> None:
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        raise MissingError("peak memory is read with glibc on Linux only") from None


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        raise MissingError("this system does not let a process forget its peak memory") from None


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise MissingError(f"this system does not tell {name}")
