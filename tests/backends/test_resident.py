"""The memory of the process, on systems that are not here, too."""

import ctypes
import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ftrain.backends import resident
from ftrain.backends.registry import Memory
from ftrain.errors import DeviceError


def test_it_grows_by_what_is_taken():
    gc.collect()
    before = resident.resident()
    taken = torch.ones(1 << 25)
    after = resident.resident()
    # Others may give something back meanwhile.
    assert after.current - before.current == pytest.approx(taken.nbytes, rel=0.3)
    assert after.peak >= after.current


PEAK = "from ftrain.backends.resident import resident; print(resident().peak)"


@pytest.mark.skipif(not resident.STATUS.exists(), reason="the system tells a peak that outlives the start of a program")
def test_the_peak_is_not_that_of_the_process_that_started_this_one():
    taken = torch.ones(1 << 29)  # 2 GiB
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(done.stdout) < taken.nbytes < resident.resident().peak


class Function:
    """A function of a library, as ctypes has it: with types of its arguments and of what it returns."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *args):
        if hasattr(self, "argtypes"):
            assert len(args) == len(self.argtypes)
            list(map(ctypes.c_void_p.from_param, args[:1]))
            self.argtypes[1].from_param(args[1])
        return self.call(*args)


@pytest.fixture
def windows(monkeypatch):
    """What Microsoft documents of GetProcessMemoryInfo; on 64 bits the structure takes 72 bytes."""

    def tell(process, found, size):
        assert process == 2**64 - 1  # What GetCurrentProcess returns, which needs all the bits of a pointer.
        assert size == found._obj.cb == 72
        found._obj.PeakWorkingSetSize, found._obj.WorkingSetSize = 7 << 32, 5 << 32
        return state.known

    state = SimpleNamespace(known=1)
    library = SimpleNamespace(
        GetCurrentProcess=Function(lambda: 2**64 - 1), K32GetProcessMemoryInfo=Function(tell), state=state
    )
    monkeypatch.setattr(resident, "resource", None)
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, use_last_error: library, raising=False)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 6, raising=False)
    return library


@pytest.mark.skipif(sys.maxsize < 2**32, reason="the sizes are those of 64 bits")
def test_windows_is_asked_by_its_own_function(windows):
    assert resident.resident() == Memory(current=5 << 32, peak=7 << 32)
    assert windows.GetCurrentProcess.restype is ctypes.c_void_p


def test_windows_says_why_not(windows):
    windows.state.known = 0
    with pytest.raises(DeviceError, match="process has: 6"):
        resident.resident()
