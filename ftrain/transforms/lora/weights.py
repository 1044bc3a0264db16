"""The arithmetic of low-rank adapters on matrices: W + s B A, and the norms that DoRA divides by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ftrain import _torch, random


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a weight, a quantised one too, in another dtype."""
    # A quantised one is of a class of its own; of plain tensors `dequantize` would make float32.
    own: Any = _torch.is_wrapper_subclass(weight)
    return (weight.dequantize() if own else weight).to(dtype)


def adapter_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of the adapters of a weight: float32, or wider where that is."""
    return torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else torch.float32


def kaiming(key: Tensor, rank: int, inputs: int, like: Tensor) -> Tensor:
    """Draw A, of shape (rank, inputs), as `torch.nn.Linear` does: uniform within one over the root of `inputs`."""
    bound = max(inputs, 1) ** -0.5
    key = random.to_device(key, like.device)
    return random.uniform(key, (rank, inputs), dtype=adapter_dtype(like), low=-bound, high=bound)


def adapted(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``W + scale * B A`` in the dtype of the adapters.

    Args:
        weight: (outputs, inputs), in any dtype.
        a: (rank, inputs).
        b: (outputs, rank).
        scale: the factor of the product.
    """
    return torch.addmm(dense(weight, a.dtype), b, a, alpha=scale)


def norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the norm of each row of ``W + scale * B A``, of shape (outputs,), as a constant.

    Its gradient is left out (Liu et al. 2024, arXiv:2402.09353, section 4.3), and no autocast makes it coarse.
    """
    with torch.autocast(a.device.type, enabled=False):
        whole = adapted(weight.detach(), a.detach(), b.detach(), scale)
        found: Tensor = torch.linalg.vector_norm(whole, dim=1)
        return found
