"""Apple's GPUs, part of torch as `torch.mps`.

There is one device and no float64 (https://docs.pytorch.org/docs/stable/notes/mps.html). Torch does not report the peak
of memory; the record returns what the driver has allocated, cache included, which is an upper bound of the peak since
the cache was last emptied. Fused kernels are those of https://github.com/pytorch/pytorch/pull/127242.

Source: https://docs.pytorch.org/docs/stable/mps.html. Not run on hardware.
"""

from __future__ import annotations

import platform

import torch

from ftrain.backends.device_module import HALF_DTYPES, DeviceModule
from ftrain.backends.registry import Memory

DEVICE = DeviceModule("mps")


BACKEND = DEVICE.record(
    platform="Apple GPU",
    describe=lambda: f"Apple {platform.machine()} GPU",
    autocast_dtypes=lambda: HALF_DTYPES,
    memory=lambda: Memory(torch.mps.current_allocated_memory(), peak=torch.mps.driver_allocated_memory()),
    distributed="gloo",
    fused_optimizers=True,
    float64=False,
)
