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
    """Return a loss in which the expert layers of transformers multiply in the dtype of autocast, where it is enabled.

    By default such a layer casts its tokens to the dtype of its matrices and calls `torch.nn.functional.grouped_mm`,
    for which autocast casts nothing (https://github.com/pytorch/pytorch/issues/174763). So the matrices are cast here.
    """
    modules = loss.module.modules() if loss.module is not None else ()
    experts = [module for module in modules if _may_multiply_by_group(module)]
    if not experts:
        return loss

    def narrowed(training: bool) -> AbstractContextManager[None]:
        # Other wrappers of the loss may have replaced forwards, too.
        return forwarding([(module, partial(_forward, module, module.forward)) for module in experts])

    return dataclasses.replace(loss, scope=extend_scope(loss, narrowed))


def _may_multiply_by_group(module: nn.Module) -> bool:
    # Expert layers have `has_gate`, which `use_experts_implementation` of transformers sets, and the configuration of
    # their model.
    return hasattr(module, "has_gate") and hasattr(getattr(module, "config", None), "_experts_implementation")


def _forward(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of an expert layer with its matrices in the dtype of autocast."""
    narrow = _narrow_matrices(module)
    slots = [Slot(_torch.parameters_of(module), key, key, False) for key in narrow]
    with bound(slots, list(narrow.values())):
        return forward(*args, **kwargs)


def _narrow_matrices(module: Any) -> dict[str, Tensor]:
    """Return the matrices of an expert layer, cast to the dtype of autocast, by name.

    Empty where autocast is off or casts them itself, or where `grouped_mm` cannot read them in that dtype.
    """
    # Read in each call, since the implementation can be set at any time.
    if module.config._experts_implementation != "grouped_mm":
        return {}
    # Biases stay as they are: each is read for many tokens, whose gradients are then added in float32.
    params = _torch.parameters_of(module)
    matrices = {key: param for key, param in params.items() if param is not None and param.ndim == 3}
    if not matrices:
        return {}
    device_type = next(iter(matrices.values())).device.type
    if not torch.is_autocast_enabled(device_type):
        return {}
    dtype = torch.get_autocast_dtype(device_type)
    if any(size * dtype.itemsize % ALIGNMENT for matrix in matrices.values() for size in matrix.shape[1:]):
        return {}
    return {key: matrix.to(dtype) for key, matrix in matrices.items()}
