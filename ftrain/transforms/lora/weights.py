"""The arithmetic of low-rank adapters on matrices: W + s B A, and the norms that DoRA divides by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ftrain import _torch, random


def adapter_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of the adapters of a weight: at least float32."""
    return torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else torch.float32


def kaiming(key: Tensor, rank: int, inputs: int, like: Tensor) -> Tensor:
    """Draw A, of shape (rank, inputs), as `torch.nn.Linear` does: uniform within ``1 / sqrt(inputs)``."""
    bound = max(inputs, 1) ** -0.5
    key = random.to_device(key, like.device)
    return random.uniform(key, (rank, inputs), dtype=adapter_dtype(like), low=-bound, high=bound)


def adapted(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``W + scale * B A`` in the dtype of the adapters; W is (outputs, inputs), A (rank, inputs)."""
    # Quantised weights are wrapper subclasses; `dequantize` would convert a plain tensor to float32.
    dense: Any = weight.dequantize() if _torch.is_wrapper_subclass(weight) else weight
    return torch.addmm(dense.to(a.dtype), b, a, alpha=scale)


def norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the norm of each row of ``W + scale * B A``, shape (outputs,), in the dtype of the adapters.

    It is a constant for the gradient (Liu et al. 2024, arXiv:2402.09353, section 4.3).
    """
    with torch.autocast(a.device.type, enabled=False):
        row_norms: Tensor = torch.linalg.vector_norm(adapted(weight.detach(), a.detach(), b.detach(), scale), dim=1)
        return row_norms
