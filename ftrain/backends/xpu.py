"""Intel GPUs, part of torch as `torch.xpu`.

Matmuls in float32 are oneDNN's, whose TF32 has a switch of its own, `torch.backends.mkldnn.allow_tf32`
(https://github.com/pytorch/pytorch/pull/144240); code compiled by Inductor follows that of CUDA
(https://github.com/pytorch/pytorch/issues/187947), so both are set.

Source: https://docs.pytorch.org/docs/stable/xpu.html. Not run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ftrain.backends.device_module import HALF_DTYPES, DeviceModule, allow_tf32, float32_matmul_precision

DEVICE = DeviceModule("xpu")


@contextmanager
def _tf32() -> Iterator[None]:
    with allow_tf32(torch.backends.mkldnn), float32_matmul_precision("high"):
        yield


BACKEND = DEVICE.record(
    platform="Intel GPU",
    autocast_dtypes=lambda: HALF_DTYPES if torch.xpu.is_bf16_supported() else (torch.float16,),
    distributed="xccl",
    tf32=lambda: _tf32() if torch.xpu.is_tf32_supported() else None,
    pinned_memory=True,
    fused_optimizers=True,
    copier=DEVICE.copier,
    recorder=DEVICE.recorder,
)
