"""Cambricon MLU, by `torch_mlu`, which renames PrivateUse1 and adds `torch.mlu`.

bfloat16 from the 500 series on, as `torch.mlu.is_bf16_supported` says. TF32 of matmuls is switched by
`torch.backends.mlu.matmul.allow_tf32`; that of CUDA has no effect. Graphs are `torch.mlu.MLUGraph`.

Source: https://github.com/Cambricon/torch_mlu/blob/main/torch_mlu/mlu/__init__.py and
https://github.com/Cambricon/torch_mlu/blob/main/torch_mlu/backends/mlu/__init__.py. Not run on hardware.
"""

from __future__ import annotations

import torch

from ftrain.backends.device_module import HALF_DTYPES, DeviceModule, allow_tf32

DEVICE = DeviceModule("mlu")


BACKEND = DEVICE.record(
    platform="Cambricon MLU",
    package="torch_mlu",
    install="Cambricon's image, https://github.com/Cambricon/torch_mlu",
    autocast_dtypes=lambda: HALF_DTYPES if DEVICE.module.is_bf16_supported() else (torch.float16,),
    distributed="cncl",
    tf32=lambda: allow_tf32(torch.backends.mlu.matmul),  # type: ignore[attr-defined]
    recorder=DEVICE.recorder,
)
