"""The memory of the process, on systems that are not here, too."""

import gc
import subprocess
import sys

import pytest
import torch

from ftrain.backends import cpu
from ftrain.backends.registry import Memory


def test_it_grows_by_what_is_taken():
    gc.collect()
    before = cpu.BACKEND.memory()
    taken = torch.ones(1 << 25)
    after = cpu.BACKEND.memory()
    # Others may give something back meanwhile.
    assert after.current - before.current == pytest.approx(taken.nbytes, rel=0.3)
    assert after.peak >= after.current


PEAK = "from ftrain.backends import cpu; print(cpu.BACKEND.memory().peak)"


@pytest.mark.skipif(not cpu.STATUS.exists(), reason="the system tells a peak that outlives the start of a program")
def test_the_peak_is_not_that_of_the_process_that_started_this_one():
    taken = torch.ones(1 << 28)  # 1 GiB
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(done.stdout) < taken.nbytes < cpu.BACKEND.memory().peak


def test_a_system_that_does_not_report_it(monkeypatch):
    """Python has no `resource` on Windows."""
    monkeypatch.setattr(cpu, "resource", None)
    assert cpu.BACKEND.memory() == Memory(current=0, peak=0)
