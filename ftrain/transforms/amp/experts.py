"""Mixture-of-experts layers of transformers: their matrix products in the dtype of autocast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import _torch
from ftrain.step.blocks import forwarding
from ftrain.step.swap_params import Slot, bound
from ftrain.step.wrapper import extend_scope
from ftrain.types import Loss

ALIGNMENT = 16
"""A row of a matrix of `grouped_mm` must take a multiple of this number of bytes."""


def with_narrow_experts(loss: Loss) -> Loss:
    """Return a loss whose experts multiply in the dtype of autocast where it is enabled, if they are of transformers.

    By default these call `torch.nn.functional.grouped_mm`, for which autocast casts nothing, with their tokens in the
    dtype of their matrices (https://github.com/pytorch/pytorch/issues/174763). So here the matrices are cast.
    """
    experts = [part for part in loss.module.modules() if _may_multiply_by_group(part)] if loss.module else []
    if not experts:
        return loss

    def narrowed(training: bool) -> AbstractContextManager[None]:
        # Other wrappers of the loss may have replaced forwards, too.
        return forwarding([(part, partial(_forward, part, part.forward)) for part in experts])

    return dataclasses.replace(loss, scope=extend_scope(loss, narrowed))


def _may_multiply_by_group(part: nn.Module) -> bool:
    # `use_experts_implementation` of transformers sets `has_gate`; all modules of a model have its configuration.
    return hasattr(part, "has_gate") and hasattr(getattr(part, "config", None), "_experts_implementation")


def _forward(part: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    narrow = _narrow_matrices(part)
    slots = [Slot(_torch.parameters_of(part), key, key, False) for key in narrow]
    with bound(slots, [*narrow.values()]):
        return forward(*args, **kwargs)


def _narrow_matrices(part: Any) -> dict[str, Tensor]:
    """Return the casts of the matrices of experts by name; none where autocast is off or would cast them itself."""
    # The implementation can be set at any time.
    if part.config._experts_implementation != "grouped_mm":
        return {}
    # Biases stay as they are: each is read for many tokens, whose gradients are then added in float32.
    matrices = {
        key: param for key, param in _torch.parameters_of(part).items() if param is not None and param.ndim == 3
    }
    device = next((matrix.device.type for matrix in matrices.values()), "")
    if not device or not torch.is_autocast_enabled(device):
        return {}
    dtype = torch.get_autocast_dtype(device)
    if any(size * dtype.itemsize % ALIGNMENT for matrix in matrices.values() for size in matrix.shape[1:]):
        return {}
    return {key: matrix.to(dtype) for key, matrix in matrices.items()}
