"""NVIDIA GPUs (and AMD's, which torch serves under the same name)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from ftrain.backends.registry import Backend, Memory, Recorder

AMPERE = (8, 0)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    host, device = torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]
    before = host.get_state(), device.get_state()
    host.manual_seed(seed)
    device.manual_seed(seed)
    try:
        yield
    finally:
        host.set_state(before[0])
        device.set_state(before[1])


def _is_ampere() -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= AMPERE


def _autocast_dtypes() -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float16) if _is_ampere() else (torch.float16,)


def _tf32() -> AbstractContextManager[None] | None:
    return _high_precision() if torch.version.hip is None and _is_ampere() else None


@contextmanager
def _high_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _memory() -> Memory:
    return Memory(current=torch.cuda.memory_allocated(), peak=torch.cuda.max_memory_allocated())


def _recorder() -> Recorder:
    # One pool: the recordings of a step run one after another, and their outputs are copied out.
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, pool=pool):
            outputs = work()
        return recorded.replay, outputs

    return record


BACKEND = Backend(
    name="cuda",
    available=torch.cuda.is_available,
    describe=lambda: torch.cuda.get_device_name(),
    autocast_dtypes=_autocast_dtypes,
    seeded=_seeded,
    synchronize=torch.cuda.synchronize,
    memory=_memory,
    distributed="nccl",
    tf32=_tf32,
    empty_cache=torch.cuda.empty_cache,
    pinned_memory=True,
    fused_optimizers=True,
    recorder=_recorder,
)
