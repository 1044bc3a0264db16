"""NVIDIA GPUs, by compute capability: bfloat16 and TF32 from 8.0 (Ampere) on.

Source: https://docs.pytorch.org/docs/stable/cuda.html, and for TF32
https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices.
"""

from __future__ import annotations

from functools import partial

import torch

from ftrain.backends.device_module import HALF_DTYPES, DeviceModule, float32_matmul_precision

VOLTA, AMPERE, ADA = (7, 0), (8, 0), (8, 9)


class _Cuda(DeviceModule):
    @property
    def generator(self) -> torch.Generator:
        # Fewer calls than the functions of torch.cuda make, since every step runs in `seeded`.
        index = torch.cuda.current_device()  # The first call also makes the generators.
        return torch.cuda.default_generators[index]


DEVICE = _Cuda("cuda")


def _is_ampere() -> bool:
    return torch.cuda.get_device_capability() >= AMPERE


def _multiple(dtype: torch.dtype) -> int:
    """Return how many elements fill 16 bytes, or from 8.0 on 128 bytes: tensor cores are fastest with multiples of it.

    There are none before 7.0. Source:
    https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html#requirements-tc
    """
    capability = torch.cuda.get_device_capability()
    if capability < VOLTA or (dtype.itemsize > 2 and capability < AMPERE):
        return 1
    return (128 if capability >= AMPERE else 16) // dtype.itemsize


BACKEND = DEVICE.record(
    platform="NVIDIA GPU",
    autocast_dtypes=lambda: HALF_DTYPES if _is_ampere() else (torch.float16,),
    distributed="nccl",
    tf32=lambda: float32_matmul_precision("high") if _is_ampere() else None,
    multiple=_multiple,
    # https://docs.pytorch.org/ao/stable/workflows/training.html
    float8=lambda: torch.cuda.get_device_capability() >= ADA,
    out_dtype=True,
    pinned_memory=True,
    fused_optimizers=True,
    fused_found_inf=True,
    # Other threads may allocate meanwhile, such as the one that pins the memory of a DataLoader.
    recorder=partial(DEVICE.recorder, capture_error_mode="thread_local"),
    copier=DEVICE.copier,
)
