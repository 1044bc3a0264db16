"""The memory of the process, on systems that are not here, too."""

import ctypes
import gc
import os
import platform
import subprocess
import sys

import pytest
import torch

from ftrain.backends import cpu, host_memory
from ftrain.backends.registry import Memory


def test_it_grows_by_what_is_taken():
    gc.collect()
    before = cpu.BACKEND.memory()
    taken = torch.ones(1 << 25)
    after = cpu.BACKEND.memory()
    # Others may give something back meanwhile.
    assert after.current - before.current == pytest.approx(taken.nbytes, rel=0.3)
    assert after.peak >= after.current


STARTED = """
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
# It stays, for the C library does otherwise with the next one when a block is given back.
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
    """Of a program that this process starts while it holds 1 GiB.

    These are the bytes of two large tensors outside of the heap, one made before `import ftrain` and one after it, and
    the peak of its memory; and of this process what it holds, and its peak.
    """
    taken = torch.ones(1 << 28)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, env=environment, check=True)
    return [*map(int, done.stdout.split()), taken.nbytes, cpu.BACKEND.memory().peak]


@pytest.mark.skipif(
    not host_memory.STATUS.exists(), reason="the system tells a peak that outlives the start of a program"
)
def test_the_peak_is_not_that_of_the_process_that_started_this_one(started):
    *_, peak, taken, peak_here = started
    assert peak < taken < peak_here


def test_a_system_that_does_not_report_it(monkeypatch):
    """Python has no `resource` on Windows."""
    monkeypatch.setattr(host_memory, "resource", None)
    assert cpu.BACKEND.memory() == Memory(current=0, peak=0)


def test_what_is_free_on_this_machine():
    free = cpu.BACKEND.free()
    assert free is None or 2**20 < free < 2**50


def test_what_is_free_in_a_job_with_a_limit_in_a_container(monkeypatch, tmp_path):
    """Each group is limited by those around it; files in the cache count as free."""
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
    reason="another C library, or glibc before 2.33, which cannot tell where a block is",
)
def test_large_tensors_are_in_the_heap_of_the_c_library_which_keeps_freed_memory(started):
    """The limit from which on tensors are outside of the heap is half of the freed memory that is kept."""
    before_the_import, after_it, *_ = started
    assert before_the_import >= 20 << 20
    assert after_it == 0
