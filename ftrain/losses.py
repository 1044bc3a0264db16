"""Losses and metrics that return a `Mean`, so that pieces of a batch add up to the whole exactly.

Every total and weight is a 0-d tensor in the dtype of the logits or predictions, float32 at least.
Nothing here reads a tensor's values on the host: shapes and dtypes are checked, labels are not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ftrain.errors import LossError
from ftrain.types import Mean


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Mean:
    """Cross-entropy of class indices, over every label that is not `ignore_index`.

    With ``p = softmax(logits)``, label ``y``, ``C`` classes, smoothing ``s`` and class weights ``w``
    (1 where none are given), a label adds

        ``-(1 - s) w[y] log p[y] - s/C sum_c w[c] log p[c]``  to the total and  ``w[y]``  to the weight,

    so that the value is ``torch.nn.functional.cross_entropy(..., reduction="mean")``. Where every
    label is ignored the total, the weight and the gradients are 0.

    Args:
        logits: (..., classes), floating point. The class axis is the last one, where torch wants it
            second.
        labels: (...), integers in ``[0, classes)``, or `ignore_index`.
        ignore_index: the label that counts for nothing.
        label_smoothing: the share of probability, in [0, 1], spread evenly over the classes.
        weight: (classes,), floating point, used in the dtype of the loss; not differentiated.

    Raises:
        LossError: a shape, dtype or the smoothing is not as above.

    Source: Szegedy et al., https://arxiv.org/abs/1512.00567, section 7 (label smoothing).

    >>> loss = cross_entropy(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [3, -100, -100]]))
    >>> float(loss.weight), round(float(loss), 4)
    (4.0, 1.3863)
    """
    _check_classes("cross_entropy", logits, labels)
    if not 0.0 <= label_smoothing <= 1.0:
        raise LossError(f"cross_entropy: label_smoothing is {label_smoothing}; it must be in [0, 1].")
    dtype = _loss_dtype(logits)
    if weight is not None:
        weight = _class_weight(weight, logits).to(dtype)
    labels = labels.long().reshape(-1)
    total = F.cross_entropy(
        logits.to(dtype).reshape(-1, logits.shape[-1]),
        labels,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    ignored = labels == ignore_index
    if weight is None:
        return Mean(total, ignored.logical_not().sum().to(dtype))
    return Mean(total, weight[labels.masked_fill(ignored, 0)].masked_fill(ignored, 0.0).sum())


def binary_cross_entropy(logits: Tensor, labels: Tensor, *, weight: Tensor | None = None) -> Mean:
    """Cross-entropy of independent yes-or-no labels, over every element.

    With ``p = sigmoid(logits)``, label ``y`` and weight ``w`` (1 where none is given), an element adds

        ``-w (y log p + (1 - y) log(1 - p))``  to the total and  ``w``  to the weight.

    Args:
        logits: (...), floating point; infinite ones give NaN, as in torch.
        labels: like `logits`: bool, integers 0 and 1, or probabilities.
        weight: bool or real, broadcast to the shape of `logits` (aligned at the last axis); its sum
            is not differentiated.

    Raises:
        LossError: a shape or dtype is not as above.

    Source: `torch.nn.functional.binary_cross_entropy_with_logits`.

    >>> round(float(binary_cross_entropy(torch.zeros(3), torch.tensor([True, False, True]))), 4)
    0.6931
    """
    _check_same("binary_cross_entropy", logits, labels, ("logits", "labels"))
    dtype = _loss_dtype(logits)
    errors = F.binary_cross_entropy_with_logits(logits.to(dtype), labels.to(dtype), reduction="none")
    return _weighted("binary_cross_entropy", errors, weight)


def mse(predictions: Tensor, targets: Tensor, *, weight: Tensor | None = None) -> Mean:
    """Squared error, over every element.

    With weight ``w`` (1 where none is given) an element adds ``w (prediction - target)^2`` to the
    total and ``w`` to the weight.

    Args:
        predictions: (...), floating point.
        targets: like `predictions`, real; used in the dtype of the loss. Nothing is broadcast.
        weight: bool or real, broadcast to the shape of `predictions` (aligned at the last axis); its
            sum is not differentiated.

    Raises:
        LossError: a shape or dtype is not as above.

    Source: `torch.nn.functional.mse_loss`.

    >>> float(mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])))
    2.0
    """
    _check_same("mse", predictions, targets, ("predictions", "targets"))
    dtype = _loss_dtype(predictions)
    return _weighted("mse", (predictions.to(dtype) - targets.to(dtype)).square(), weight)


def accuracy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Mean:
    """The share of labels that are the class of the highest logit; a metric, without a gradient.

    Args:
        logits: (..., classes), floating point.
        labels: (...), integers; those equal to `ignore_index` count for nothing.
        ignore_index: the label that counts for nothing.

    Raises:
        LossError: a shape or dtype is not as above.

    >>> float(accuracy(torch.eye(4), torch.tensor([0, 1, 0, -100])).total)
    2.0
    """
    _check_classes("accuracy", logits, labels)
    labels = labels.long()
    kept = labels != ignore_index
    correct = (logits.argmax(-1) == labels) & kept
    dtype = _loss_dtype(logits)
    return Mean(correct.sum().to(dtype), kept.sum().to(dtype))


def _loss_dtype(outputs: Tensor) -> torch.dtype:
    return torch.promote_types(outputs.dtype, torch.float32)


def _weighted(function: str, errors: Tensor, weight: Tensor | None) -> Mean:
    if weight is None:
        return Mean(errors.sum(), torch.full((), errors.numel(), dtype=errors.dtype, device=errors.device))
    if weight.is_complex() or not _broadcasts(weight.shape, errors.shape):
        raise LossError(
            f"{function}: weight is {_kind(weight)}; it must be real and broadcast to {tuple(errors.shape)}."
        )
    weight = weight.to(errors.dtype)
    return Mean((errors * weight).sum(), weight.detach().expand(errors.shape).sum())


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in pairs)


def _check_classes(function: str, logits: Tensor, labels: Tensor) -> None:
    _check_floating(function, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise LossError(
            f"{function}: logits have shape {tuple(logits.shape)}; they must be (..., classes), "
            "with at least one class on the last axis."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise LossError(
            f"{function}: labels are {_kind(labels)}; they must be integer class indices. "
            "Take argmax(-1) of one-hot labels."
        )
    if labels.shape != logits.shape[:-1]:
        raise LossError(
            f"{function}: logits have shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; "
            f"labels must have shape {tuple(logits.shape[:-1])}, for the class axis is the last of logits."
        )


def _check_same(function: str, outputs: Tensor, targets: Tensor, names: tuple[str, str]) -> None:
    _check_floating(function, names[0], outputs)
    if targets.is_complex():
        raise LossError(f"{function}: {names[1]} are {_kind(targets)}; they must be real.")
    if outputs.shape != targets.shape:
        raise LossError(
            f"{function}: {names[0]} have shape {tuple(outputs.shape)} and {names[1]} "
            f"{tuple(targets.shape)}; they must be equal, for nothing is broadcast. Reshape one of them."
        )


def _check_floating(function: str, name: str, value: Tensor) -> None:
    if not value.is_floating_point():
        raise LossError(f"{function}: {name} are {_kind(value)}; they must be floating point.")


def _class_weight(weight: Tensor, logits: Tensor) -> Tensor:
    if not weight.is_floating_point() or weight.shape != logits.shape[-1:]:
        raise LossError(
            f"cross_entropy: weight is {_kind(weight)}; it must be floating point, one for each class, "
            f"of shape {tuple(logits.shape[-1:])}."
        )
    return weight.detach()


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
