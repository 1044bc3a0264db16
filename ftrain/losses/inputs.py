"""What the losses hold their inputs to, and what follows from these alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain.errors import LossError


def loss_dtype(outputs: Tensor) -> torch.dtype:
    """The dtype of totals and weights: that of the outputs, float32 at least."""
    return torch.promote_types(outputs.dtype, torch.float32)


def weight_of_labels(labels: Tensor, ignore_index: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of the class weights of all labels that count."""
    ignored = labels == ignore_index
    if weight is None:
        return ignored.logical_not().sum().to(dtype)
    return weight[labels.masked_fill(ignored, 0)].masked_fill(ignored, 0.0).sum()


def require_classes(function: str, logits: Tensor, labels: Tensor) -> None:
    """Check logits and the class indices that belong to them.

    Raises:
        LossError: for another dtype or shape.
    """
    require_floating(function, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise LossError(
            f"{function}: logits have shape {tuple(logits.shape)}; they must be (..., classes), "
            "with at least one class on the last axis."
        )
    require_indices(function, labels)
    if labels.shape != logits.shape[:-1]:
        raise LossError(
            f"{function}: logits have shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; "
            f"labels must have shape {tuple(logits.shape[:-1])}, for the class axis is the last of logits."
        )


def require_indices(function: str, labels: Tensor) -> None:
    """Check that labels are integers.

    Raises:
        LossError: when they are something else.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise LossError(
            f"{function}: labels are {kind(labels)}; they must be integer class indices. "
            "Take argmax(-1) of one-hot labels."
        )


def require_floating(function: str, name: str, value: Tensor) -> None:
    """Check that a tensor is of real floating-point numbers.

    Raises:
        LossError: when it is something else.
    """
    if not value.is_floating_point():
        raise LossError(f"{function}: {name} are {kind(value)}; they must be floating point.")


def require_smoothing(function: str, label_smoothing: float) -> None:
    """Check a share of probability.

    Raises:
        LossError: when it is outside of [0, 1].
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise LossError(f"{function}: label_smoothing is {label_smoothing}; it must be in [0, 1].")


def require_class_weight(function: str, name: str, weight: Tensor, classes: int) -> None:
    """Check for one weight a class.

    Raises:
        LossError: for another dtype or shape.
    """
    if not weight.is_floating_point() or weight.shape != (classes,):
        raise LossError(
            f"{function}: {name} is {kind(weight)}; it must be floating point, one for each class, "
            f"of shape {(classes,)}."
        )


def kind(value: Tensor) -> str:
    """A tensor's dtype and shape, for messages."""
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
