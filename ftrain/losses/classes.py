"""Losses and metrics of class indices, from logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ftrain.errors import require_range
from ftrain.losses.inputs import (
    at_least_float32,
    require_classes,
    require_ignore_index,
    require_real,
    weight_of_labels,
)
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
    (1 by default), a label adds

        ``-(1 - s) w[y] log p[y] - s/C sum_c w[c] log p[c]``  to the total and  ``w[y]``  to the weight,

    so that the value is ``torch.nn.functional.cross_entropy(..., reduction="mean")``. Where every
    label is ignored the total, the weight and the gradients are 0.

    Args:
        logits: (..., classes), floating point. The class axis is the last one; in torch it is the
            second one. NaN in a row whose label is ignored is left out of the loss, but is NaN in the gradient of that
            row, as in torch (`linear_cross_entropy` leaves it out of both).
        labels: (...), integers in ``[0, classes)``, or `ignore_index`.
        ignore_index: the label of elements to leave out.
        label_smoothing: the share of probability, in [0, 1], spread evenly over the classes.
        weight: (classes,), floating point, used in the dtype of the loss; not differentiated.

    Raises:
        LossError: a shape or dtype of logits or labels is not as above. Torch checks the shape of the weight.
        OptionError: the smoothing is not in [0, 1], or `ignore_index` no integer.

    Source: Szegedy et al., https://arxiv.org/abs/1512.00567, section 7 (label smoothing).

    >>> import torch
    >>> loss = cross_entropy(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [3, -100, -100]]))
    >>> float(loss.weight), round(float(loss), 4)
    (4.0, 1.3863)
    """
    require_classes("cross_entropy", logits, labels)
    require_real("cross_entropy", weight)
    require_ignore_index("cross_entropy", ignore_index)
    require_range("cross_entropy", "label_smoothing", label_smoothing, 0.0, 1.0, closed=True)
    dtype = at_least_float32(logits.dtype)
    if weight is not None:
        weight = weight.detach().to(dtype)
    labels = labels.long().reshape(-1)
    total = F.cross_entropy(
        logits.to(dtype).reshape(-1, logits.shape[-1]),
        labels,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return Mean(total, weight_of_labels(labels, ignore_index, weight, dtype))


def accuracy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Mean:
    """The share of labels equal to the class with the highest logit; a metric, not differentiable.

    Args:
        logits: (..., classes), floating point.
        labels: (...), integers in ``[0, classes)``, or `ignore_index`.
        ignore_index: the label of elements to leave out.

    Raises:
        LossError: a shape or dtype is not as above.
        OptionError: `ignore_index` is no integer.

    >>> import torch
    >>> float(accuracy(torch.eye(4), torch.tensor([0, 1, 0, -100])).total)
    2.0
    """
    require_classes("accuracy", logits, labels)
    require_ignore_index("accuracy", ignore_index)
    labels = labels.long()
    counts = labels != ignore_index
    correct = (logits.argmax(-1) == labels) & counts
    dtype = at_least_float32(logits.dtype)
    return Mean(correct.sum().to(dtype), counts.sum().to(dtype))
