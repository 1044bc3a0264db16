"""The CPU: always there, computes in bfloat16 and float16 autocast, has fused optimizer kernels."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ftrain.backends.onednn import scratch
from ftrain.backends.registry import Backend
from ftrain.backends.resident import resident

MEMINFO = Path("/proc/meminfo")
LIMIT, USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    put_back = _generators()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        put_back()


def _generators() -> Callable[[], None]:
    before = torch.default_generator.get_state()

    def put_back() -> None:
        torch.default_generator.set_state(before)

    return put_back


def _free() -> int | None:
    """What the kernel would give without swapping, within the limit of a container (cgroup v2)."""
    if not MEMINFO.exists():
        return None
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    free = next((int(kib) * 1024 for name, kib, *_ in lines if name == "MemAvailable:"), None)
    if free is not None and LIMIT.exists() and (limit := LIMIT.read_text().strip()).isdigit():
        free = max(0, min(free, int(limit) - int(USED.read_text())))
    return free


BACKEND = Backend(
    name="cpu",
    available=lambda: True,
    describe=lambda: f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
    autocast_dtypes=lambda: (torch.bfloat16, torch.float16),
    seeded=_seeded,
    generators=_generators,
    synchronize=lambda: None,
    memory=resident,
    free=_free,
    distributed="gloo",
    fused_optimizers=True,
    immediate=True,
    scratch=scratch,
)
