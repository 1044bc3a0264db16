"""Losses that are a sum over elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ftrain.errors import LossError
from ftrain.losses.inputs import at_least_float32, require_floating, require_real, require_tensor
from ftrain.tree import describe
from ftrain.types import Mean


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, pos_weight: Tensor | None = None
) -> Mean:
    """Cross-entropy of independent yes-or-no labels, over every element.

    With ``p = sigmoid(logits)``, label ``y``, weight ``w`` and weight ``v`` of the label 1 (1 by default), an element
    adds

        ``-w (v y log p + (1 - y) log(1 - p))``  to the total and  ``w``  to the weight.

    Args:
        logits: (...), floating point; infinite ones give NaN, as in torch.
        labels: like `logits`: bool, integers 0 and 1, or probabilities.
        weight: bool or real, broadcast to the shape of `logits`; its sum is not differentiated. Elements of weight 0
            may hold anything, NaN included, unless the weight itself has a gradient.
        pos_weight: real, broadcast to the shape of `logits`, such as (classes,): above 1 for labels that are rarely 1.

    Raises:
        LossError: a shape or dtype is not as above. Torch checks the shapes of the weights.

    Source: `torch.nn.functional.binary_cross_entropy_with_logits`.

    >>> round(float(binary_cross_entropy(torch.zeros(3), torch.tensor([True, False, True]))), 4)
    0.6931
    """
    _require_same_shape("binary_cross_entropy", logits, labels, ("logits", "labels"))
    require_real("binary_cross_entropy", weight)
    require_real("binary_cross_entropy", pos_weight)
    dtype = at_least_float32(logits.dtype)
    pos_weight = None if pos_weight is None else pos_weight.to(dtype)
    error = partial(F.binary_cross_entropy_with_logits, reduction="none", pos_weight=pos_weight)
    return _weighted(error, logits.to(dtype), labels.to(dtype), weight)


def mse(predictions: Tensor, targets: Tensor, *, weight: Tensor | None = None) -> Mean:
    """Squared error, over every element.

    With weight ``w`` (1 by default) an element adds ``w (prediction - target)^2`` to the total and ``w`` to the weight.

    Args:
        predictions: (...), floating point.
        targets: like `predictions`, real; used in the dtype of the loss. Nothing is broadcast.
        weight: bool or real, broadcast to the shape of `predictions`; its sum is not differentiated. Elements of weight
            0 may hold anything, NaN included, unless the weight itself has a gradient.

    Raises:
        LossError: a shape or dtype is not as above. Torch checks the shape of the weight.

    Source: `torch.nn.functional.mse_loss`.

    >>> float(mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])))
    2.0
    """
    _require_same_shape("mse", predictions, targets, ("predictions", "targets"))
    require_real("mse", weight)
    dtype = at_least_float32(predictions.dtype)
    return _weighted(lambda a, b: (a - b).square(), predictions.to(dtype), targets.to(dtype), weight)


def _weighted(
    error: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, weight: Tensor | None
) -> Mean:
    """Return the weighted mean of ``error(outputs, targets)``, which are of one shape, over all elements."""
    if weight is None:
        errors = error(outputs, targets)
        return Mean(errors.sum(), torch.full((), errors.numel(), dtype=errors.dtype, device=errors.device))
    weight = weight.expand(outputs.shape)
    # Masked before the error is computed: 0 x NaN is NaN, in the loss and in the gradient. If the weight requires a
    # gradient, nothing is masked, because its gradient is the error.
    if not weight.requires_grad:
        outputs = outputs.masked_fill(weight == 0, 0)
        targets = targets.masked_fill(weight == 0, 0)
    errors = error(outputs, targets)
    weight = weight.to(outputs.dtype)
    return Mean((errors * weight).sum(), weight.detach().sum())


def _require_same_shape(function: str, outputs: Tensor, targets: Tensor, names: tuple[str, str]) -> None:
    require_floating(function, names[0], outputs)
    require_tensor(function, names[1], targets)
    if targets.is_complex():
        raise LossError(f"{function}: {names[1]} are {describe(targets)}; they must be real.")
    if outputs.shape != targets.shape:
        raise LossError(
            f"{function}: {names[0]} have shape {tuple(outputs.shape)} and {names[1]} "
            f"{tuple(targets.shape)}; they must be equal, because nothing is broadcast. Reshape one of them."
        )
