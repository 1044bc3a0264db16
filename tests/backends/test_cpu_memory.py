"""The memory of the process, on this system and on others."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch

from ftrain.backends import cpu, host_memory
from ftrain.backends.registry import Memory

GROWING = """
import torch
from ftrain.backends import cpu
before = cpu.BACKEND.memory()
tensor = torch.ones(1 << 25)
after = cpu.BACKEND.memory()
print(after.current - before.current, after.peak - after.current)
"""


def test_it_grows_by_the_bytes_of_a_tensor():
    # In a process of its own: this one may use memory again that other tests have freed.
    result = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True, check=True)
    growth, below_peak = map(int, result.stdout.split())
    assert growth == pytest.approx(4 << 25, rel=0.05)
    assert below_peak >= 0


PROGRAM = """
import ctypes, torch

class Info(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

def outside():
    # hblkhd, the bytes of blocks outside of the heap.
    return mallinfo2().field4 if mallinfo2 else 0

mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mallinfo2:
    mallinfo2.restype = Info
before = outside()
# It stays alive: when a large block is freed, glibc takes the next one from its heap.
tensor = torch.empty(20 << 20, dtype=torch.uint8)
mapped = outside()
import ftrain
from ftrain.backends import cpu
imported = outside()
other = torch.empty(20 << 20, dtype=torch.uint8)
print(mapped - before, outside() - imported, cpu.BACKEND.memory().peak)
"""


@pytest.fixture(scope="module")
def started():
    """Return five numbers of bytes, after this process has held 1 GiB and started a program.

    Of the program: the bytes outside of the heap of a large tensor that was made before `import ftrain`, those of one
    that was made after it, and its peak. Of this process: the 1 GiB, and its peak.
    """
    tensor = torch.ones(1 << 28)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return [*map(int, process.stdout.split()), tensor.nbytes, cpu.BACKEND.memory().peak]


@pytest.mark.skipif(
    not host_memory.STATUS.exists(), reason="the system reports a peak that survives the start of a program"
)
def test_the_peak_is_not_that_of_the_process_that_started_this_one(started):
    *_, peak_of_program, held_by_starter, peak_of_starter = started
    assert peak_of_program < held_by_starter < peak_of_starter


def test_a_system_that_does_not_report_it(monkeypatch):
    """Python has no `resource` on Windows."""
    monkeypatch.setattr(host_memory, "resource", None)
    assert cpu.BACKEND.memory() == Memory(current=0, peak=0)


def test_free_memory_on_this_machine():
    free = cpu.BACKEND.free()
    assert free is None or 2**20 < free < 2**50


def test_free_memory_in_a_job_with_a_limit_in_a_container(monkeypatch, tmp_path):
    """The limits of all parents hold for a group; files in the cache count as free."""
    job = tmp_path / "cgroup/container/job"
    job.mkdir(parents=True)
    files = {
        "meminfo": "MemTotal: 8 kB\nMemAvailable: 5 kB\n",
        "of_process": "1:name=systemd:/other\n0::/container/job\n",
        "cgroup/container/memory.max": "4096\n",
        "cgroup/container/memory.current": "3072\n",
        "cgroup/container/memory.stat": "anon 1\ninactive_file 512\nactive_file 1024\n",
        "cgroup/container/job/memory.max": "max\n",
        "cgroup/container/job/memory.current": "1024\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "CGROUP_OF_PROCESS", tmp_path / "of_process")
    assert cpu.BACKEND.free() == 4096 - 3072 + 1536
    (job / "memory.max").write_text("2048\n")
    assert cpu.BACKEND.free() == 2048 - 1024
    (tmp_path / "of_process").write_text("0::/\n")
    assert cpu.BACKEND.free() == 5120
    (tmp_path / "meminfo").unlink()
    assert cpu.BACKEND.free() is None


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="another C library, or glibc before 2.33, which does not report the bytes outside of the heap",
)
def test_after_the_import_large_tensors_are_in_the_heap_of_which_glibc_keeps_freed_memory(started):
    """The size from which on tensors are outside of the heap is half of the freed memory that glibc keeps."""
    outside_before_import, outside_after_import, *_ = started
    assert outside_before_import >= 20 << 20
    assert outside_after_import == 0
