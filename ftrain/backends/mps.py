"""Apple's GPUs, part of torch as `torch.mps`.

There is one device and no float64 (https://docs.pytorch.org/docs/stable/notes/mps.html). The peak of memory is not
counted; what the driver has given to the process, cache included, is the most there can have been since the cache was
emptied. Fused kernels are those of https://github.com/pytorch/pytorch/pull/127242. No graphs and no TF32;
`torch.distributed` runs over gloo.

Source: https://docs.pytorch.org/docs/stable/mps.html. Not run on hardware.
"""

from __future__ import annotations

import platform

import torch

from ftrain.backends.device_module import NARROW, DeviceModule
from ftrain.backends.registry import Backend, Memory

DEVICE = DeviceModule("mps")


def _memory() -> Memory:
    return Memory(current=torch.mps.current_allocated_memory(), peak=torch.mps.driver_allocated_memory())


BACKEND = Backend(
    name="mps",
    platform="Apple GPU",
    available=DEVICE.available,
    describe=lambda: f"Apple {platform.machine()} GPU",
    autocast_dtypes=lambda: NARROW,
    seeded=DEVICE.seeded,
    synchronize=DEVICE.synchronize,
    memory=_memory,
    distributed="gloo",
    empty_cache=DEVICE.empty_cache,
    fused_optimizers=True,
    float64=False,
)
