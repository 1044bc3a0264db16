"""Check the inputs of losses; compute the dtype of a loss and the weight of labels."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import Any

import torch
from torch import Tensor

from ftrain.errors import LossError, OptionError
from ftrain.tree import describe


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of totals and weights, from the dtype of the outputs: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def weight_of_labels(labels: Tensor, ignore_index: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of the class weights of all labels except those equal to `ignore_index`, as a 0-d tensor."""
    ignored = labels == ignore_index
    if weight is None:
        return ignored.logical_not().sum().to(dtype)
    return weight[labels.masked_fill(ignored, 0)].masked_fill(ignored, 0.0).sum()


def require_classes(function: str, logits: Tensor, labels: Tensor) -> None:
    """Check that logits are floating point (..., classes), and labels integers (...). Raises a LossError if not."""
    require_floating(function, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise LossError(
            f"{function}: logits have shape {tuple(logits.shape)}; they must be (..., classes), "
            "with at least one class on the last axis."
        )
    require_indices(function, labels)
    if labels.shape != logits.shape[:-1]:
        is_second = logits.ndim > 2 and labels.shape == logits.shape[:1] + logits.shape[2:]
        raise LossError(
            f"{function}: logits have shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; "
            f"labels must have shape {tuple(logits.shape[:-1])}, because the class axis is the last of logits."
            + (" If it is the second one, as after a convolution, pass logits.movedim(1, -1)." if is_second else "")
        )


def require_tensor(function: str, name: str, value: Any) -> None:
    """Check that an input is a tensor. Raises a LossError if not."""
    if not isinstance(value, Tensor):
        raise LossError(
            f"{function}: {name} are {type(value).__name__}; they must be a tensor. Of the output of a model of "
            "transformers pass output.logits, and convert arrays and lists with torch.as_tensor."
        )


def require_indices(function: str, labels: Tensor) -> None:
    """Check that labels are integers. Raises a LossError if not."""
    require_tensor(function, "labels", labels)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise LossError(
            f"{function}: labels are {describe(labels)}; they must be integer class indices. "
            "Take argmax(-1) of one-hot labels; for probabilities of classes (as of mixup) use "
            "torch.nn.functional.cross_entropy, which is a mean over examples."
        )


def require_ignore_index(function: str, ignore_index: Any) -> None:
    """Check that `ignore_index` is an integer. Raises an OptionError if not."""
    is_whole = type(ignore_index) is int
    if not is_whole and not isinstance(ignore_index, bool):
        with suppress(TypeError):
            index(ignore_index)  # A tensor or an array has this method, whatever it holds.
            is_whole = True
    if not is_whole:
        raise OptionError(
            f"{function}: ignore_index is {ignore_index!r}, needs an integer; -100, the default, ignores no class"
        )


def require_floating(function: str, name: str, value: Tensor) -> None:
    """Check that a tensor has a floating-point dtype. Raises a LossError if not."""
    require_tensor(function, name, value)
    if not value.is_floating_point():
        raise LossError(f"{function}: {name} are {describe(value)}; they must be floating point.")


def require_real(function: str, weight: Tensor | None) -> None:
    """Check that a weight is a real tensor, or None. Raises a LossError if not: torch would drop an imaginary part."""
    if weight is None:
        return
    require_tensor(function, "weights", weight)
    if weight.is_complex():
        raise LossError(f"{function}: the weight is {describe(weight)}; it must be real.")
