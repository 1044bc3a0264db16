"""The resident memory of this process, as the operating system reports it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ftrain.backends.registry import Memory

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

STATM = Path("/proc/self/statm")
STATUS = Path("/proc/self/status")


def resident() -> Memory:
    """Return the resident memory of the process; zero on a system that has no `resource`."""
    return Memory(current=0, peak=0) if resource is None else _of_unix()


def _of_unix() -> Memory:
    peak = _peak_of_linux() or _peak_of_unix()
    current = int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else peak
    # The kernel counts them separately, and they are read at different moments.
    return Memory(current=current, peak=max(current, peak))


def _peak_of_linux() -> int:
    """Return bytes, or 0 if the system does not report them: see VmHWM in proc_pid_status(5)."""
    match = re.search(r"^VmHWM:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return int(match[1]) * 1024 if match else 0


def _peak_of_unix() -> int:
    """Peak bytes. On Linux at least those of the process that started this one: they survive exec, see getrusage(2)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
