"""AMD GPUs: torch gives them the device type ``cuda`` and the module `torch.cuda`, and sets `torch.version.hip`.

All AMD GPUs that ROCm supports compute in bfloat16. There is no TF32: `allow_tf32` affects NVIDIA GPUs only. The
`torch.distributed` backend ``nccl`` is RCCL.

Source: https://docs.pytorch.org/docs/stable/notes/hip.html. Not run on hardware.
"""

from __future__ import annotations

import dataclasses

import torch

from ftrain.backends import cuda
from ftrain.backends.device_module import HALF_DTYPES

FLOAT8_ARCHITECTURES = "gfx94", "gfx95"
"""MI300 and MI350, for which torchao has float8 (its `Float8TypeConfig`)."""


BACKEND = dataclasses.replace(
    cuda.BACKEND,
    platform="AMD GPU",
    autocast_dtypes=lambda: HALF_DTYPES,
    tf32=lambda: None,
    multiple=lambda dtype: 1,
    float8=lambda: str(torch.cuda.get_device_properties().gcnArchName).startswith(FLOAT8_ARCHITECTURES),
    out_dtype=False,
)
