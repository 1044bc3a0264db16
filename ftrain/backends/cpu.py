"""The CPU: always there, computes in bfloat16 and float16 autocast, has fused optimizer kernels."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ftrain.backends.registry import Backend, Memory

STATM = Path("/proc/self/statm")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _memory() -> Memory:
    """Resident memory of the process: there is no allocator of our own to ask."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    current = int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else peak
    # The two are counted in different places, and not at the same moment.
    return Memory(current=current, peak=max(current, peak))


BACKEND = Backend(
    name="cpu",
    available=lambda: True,
    describe=lambda: f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
    autocast_dtypes=lambda: (torch.bfloat16, torch.float16),
    seeded=_seeded,
    synchronize=lambda: None,
    memory=_memory,
    distributed="gloo",
    fused_optimizers=True,
)
