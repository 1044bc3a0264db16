"""The memory of the host: the bytes that this process uses, the free bytes, and freed memory in the C library."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ftrain.backends.registry import Memory

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MEMINFO, STATM, STATUS = Path("/proc/meminfo"), Path("/proc/self/statm"), Path("/proc/self/status")
CGROUPS, CGROUP_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

LARGEST_IN_HEAP = (32 << 20) - (64 << 10)
"""Bytes of the largest tensor that glibc may allocate in its heap, with a margin for its own data."""


def memory() -> Memory:
    """Return the bytes that this process uses, and their peak; 0 if the system does not report them."""
    if resource is None:
        return Memory(current=0, peak=0)  # type: ignore[unreachable]
    peak = _peak()
    current = int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else peak
    # The kernel counts them separately, and they are read at different moments.
    return Memory(current=current, peak=max(current, peak))


def _peak() -> int:
    # VmHWM, see proc_pid_status(5), is preferred: the peak of getrusage(2) survives exec, so on Linux it is at least
    # that of the process that started this one.
    match = re.search(r"^VmHWM:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    if match:
        return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free() -> int | None:
    """Return the bytes that are available without swapping; None if the system does not report its memory.

    Containers and jobs of SLURM have limits (cgroup v2); the limits of all parents of a control group hold for it, too.
    """
    available = _field(MEMINFO, "MemAvailable:")
    if available is None:
        return None
    return max(0, min([available * 1024, *_free_in_groups()]))


def _free_in_groups() -> Iterator[int]:
    """Yield the free bytes of each control group of this process that has a limit, innermost first."""
    lines = CGROUP_OF_PROCESS.read_text().splitlines() if CGROUP_OF_PROCESS.exists() else []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    innermost = CGROUPS / path
    for group in (innermost, *innermost.parents):
        limit_file, used_file = group / "memory.max", group / "memory.current"
        if limit_file.exists() and used_file.exists():
            limit = limit_file.read_text().strip()
            if limit.isdigit():  # "max" without a limit.
                # The kernel drops cached files before it refuses memory.
                cached = (_field(group / "memory.stat", name) or 0 for name in ("inactive_file", "active_file"))
                yield int(limit) - int(used_file.read_text()) + sum(cached)
        if group == CGROUPS:
            return


def _field(file: Path, name: str) -> int | None:
    """Return the number after a name, in a file with a name and a number on each line."""
    lines = (line.split() for line in file.read_text().splitlines()) if file.exists() else ()
    return next((int(number) for key, number, *_ in lines if key == name), None)


def keep_freed() -> None:
    """Let the C library keep up to 64 MiB of freed memory for the next step. It takes no memory itself.

    Otherwise glibc returns the memory of a step to the system when the step ends, and the system clears each page again
    for the next one: 1 to 3% of the time of a step with two million parameters, and up to 7% if ranks communicate. When
    a block of up to 32 MiB is freed, glibc keeps from then on twice its size; so this allocates and frees one, whose
    pages are never used. Nothing changes in other C libraries, or with ``MALLOC_TRIM_THRESHOLD_``. Source: mallopt(3),
    M_MMAP_THRESHOLD.
    """
    torch.empty(LARGEST_IN_HEAP, dtype=torch.uint8, device="cpu")
