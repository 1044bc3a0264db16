"""NVIDIA GPUs, by compute capability: bfloat16 and TF32 from 8.0 (Ampere) on.

Source: https://docs.pytorch.org/docs/stable/cuda.html, and for TF32
https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ftrain.backends.device_module import NARROW, DeviceModule, float32_products

VOLTA, AMPERE, ADA = (7, 0), (8, 0), (8, 9)
DEVICE = DeviceModule("cuda")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """`DeviceModule.seeded` with fewer calls, since every step runs in it."""
    restore = generators()
    torch.default_generator.manual_seed(seed)
    _generator().manual_seed(seed)
    try:
        yield
    finally:
        restore()


def generators() -> Callable[[], None]:
    """`DeviceModule.generators` with fewer calls."""
    host, device = torch.default_generator, _generator()
    states = host.get_state(), device.get_state()

    def restore() -> None:
        host.set_state(states[0])
        device.set_state(states[1])

    return restore


def _generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _is_ampere() -> bool:
    return torch.cuda.get_device_capability() >= AMPERE


def _autocast_dtypes() -> tuple[torch.dtype, ...]:
    return NARROW if _is_ampere() else (torch.float16,)


def _tf32() -> AbstractContextManager[None] | None:
    return float32_products("high") if _is_ampere() else None


def _float8() -> bool:
    """From 8.9 (Ada, Hopper) on: https://docs.pytorch.org/ao/stable/workflows/training.html."""
    return torch.cuda.get_device_capability() >= ADA


def _multiple(dtype: torch.dtype) -> int:
    """Tensor cores take axes of whole multiples of 16 bytes at full speed, and from 8.0 on of 128; 7.0 has the first.

    https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html#requirements-tc
    """
    capability = torch.cuda.get_device_capability()
    if capability < VOLTA or (dtype.itemsize > 2 and capability < AMPERE):
        return 1
    return (128 if capability >= AMPERE else 16) // dtype.itemsize


BACKEND = DEVICE.record(
    platform="NVIDIA GPU",
    autocast_dtypes=_autocast_dtypes,
    seeded=seeded,
    generators=generators,
    distributed="nccl",
    tf32=_tf32,
    multiple=_multiple,
    float8=_float8,
    pinned_memory=True,
    fused_optimizers=True,
    recorder=DEVICE.recorder,
    copier=DEVICE.copier,
)
