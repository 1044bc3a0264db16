"""AMD GPUs: torch serves them as device type ``cuda`` and `torch.cuda`, and says so in `torch.version.hip`.

A record of its own, for a build of torch is for the one or the other. All of AMD's that ROCm supports compute in
bfloat16. There is no TF32: `allow_tf32` is for NVIDIA's. The `torch.distributed` backend ``nccl`` is RCCL.

Source: https://docs.pytorch.org/docs/stable/notes/hip.html. Not run on hardware.
"""

from __future__ import annotations

import dataclasses

from ftrain.backends import cuda
from ftrain.backends.device_module import NARROW

BACKEND = dataclasses.replace(
    cuda.BACKEND,
    platform="AMD GPU",
    autocast_dtypes=lambda: NARROW,
    tf32=lambda: None,
    multiple=lambda dtype: 1,
)
