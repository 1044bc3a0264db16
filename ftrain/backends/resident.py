"""The resident memory of this process, as the operating system reports it."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

from ftrain.backends.registry import Memory
from ftrain.errors import DeviceError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

STATM = Path("/proc/self/statm")
STATUS = Path("/proc/self/status")


def resident() -> Memory:
    """Return the resident memory of the process.

    Raises:
        DeviceError: when Windows reports an error.
    """
    return _of_windows() if resource is None else _of_unix()


def _of_unix() -> Memory:
    peak = _peak_of_linux() or _peak_of_unix()
    current = int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else peak
    # The kernel counts them separately, and they are read at different moments.
    return Memory(current=current, peak=max(current, peak))


def _peak_of_linux() -> int:
    """Return bytes, or 0 where the system does not report them: see VmHWM in proc_pid_status(5)."""
    match = re.search(r"^VmHWM:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return int(match[1]) * 1024 if match else 0


def _peak_of_unix() -> int:
    """Bytes. On Linux at least those of the process that started this one: they outlive exec, see getrusage(2)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Counters(ctypes.Structure):
    """``PROCESS_MEMORY_COUNTERS``, https://learn.microsoft.com/windows/win32/api/psapi/ns-psapi-process_memory_counters."""

    _fields_ = (
        ("cb", ctypes.c_uint32),
        ("PageFaultCount", ctypes.c_uint32),
        ("PeakWorkingSetSize", ctypes.c_size_t),
        ("WorkingSetSize", ctypes.c_size_t),
        ("QuotaPeakPagedPoolUsage", ctypes.c_size_t),
        ("QuotaPagedPoolUsage", ctypes.c_size_t),
        ("QuotaPeakNonPagedPoolUsage", ctypes.c_size_t),
        ("QuotaNonPagedPoolUsage", ctypes.c_size_t),
        ("PagefileUsage", ctypes.c_size_t),
        ("PeakPagefileUsage", ctypes.c_size_t),
    )


def _of_windows() -> Memory:
    windows: Any = ctypes
    system = windows.WinDLL("kernel32", use_last_error=True)
    system.GetCurrentProcess.restype = ctypes.c_void_p
    get_info = system.K32GetProcessMemoryInfo
    get_info.argtypes = ctypes.c_void_p, ctypes.POINTER(_Counters), ctypes.c_uint32
    counters = _Counters(cb=ctypes.sizeof(_Counters))
    if not get_info(system.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        raise DeviceError(f"cpu: Windows does not say what memory the process has: {windows.get_last_error()}")
    return Memory(current=counters.WorkingSetSize, peak=counters.PeakWorkingSetSize)
