"""Cambricon MLU, by `torch_mlu`, which renames PrivateUse1 and puts `torch.mlu` there.

bfloat16 from the 500 series on, as `torch.mlu.is_bf16_supported` says. TF32 of products is switched by
`torch.backends.mlu.matmul.allow_tf32`; that of CUDA has no effect. Graphs are `torch.mlu.MLUGraph`.

Source: https://github.com/Cambricon/torch_mlu/blob/main/torch_mlu/mlu/__init__.py and
https://github.com/Cambricon/torch_mlu/blob/main/torch_mlu/backends/mlu/__init__.py. Not run on hardware.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ftrain.backends.device_module import NARROW, DeviceModule, allow_tf32

DEVICE = DeviceModule("mlu")


def _autocast_dtypes() -> tuple[torch.dtype, ...]:
    return NARROW if DEVICE.module.is_bf16_supported() else (torch.float16,)


def _tf32() -> AbstractContextManager[None]:
    backends: Any = torch.backends
    return allow_tf32(backends.mlu.matmul)


BACKEND = DEVICE.record(
    platform="Cambricon MLU",
    package="torch_mlu",
    install="Cambricon's image, https://github.com/Cambricon/torch_mlu",
    autocast_dtypes=_autocast_dtypes,
    distributed="cncl",
    tf32=_tf32,
    recorder=DEVICE.recorder,
)
