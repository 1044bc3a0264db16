"""Whether the loss of a batch is the mean of the losses of its pieces."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ftrain import tree
from ftrain.types import Loss, Mean, PyTree

TOLERANCE, NARROW_TOLERANCE = 1e-3, 2e-2
"""Relative differences up to which two losses count as the same: in 32 bits or more, and with parameters or products in
16 bits."""


def combined(pieces: Sequence[Mean]) -> float:
    """Return the loss of pieces together; waits for the device."""
    return float(functools.reduce(lambda a, b: a + b, pieces))


def is_combined(loss: Loss, params: PyTree, whole: Mean, pieces: Sequence[Mean]) -> bool:
    """Return whether the loss of a batch counts as that of its pieces together; waits for the device.

    Args:
        loss: the function that has returned them.
        params: the parameters of the loss.
        whole: the loss of the batch. One that is not finite tells nothing, and counts as the same.
        pieces: the losses of its pieces.
    """
    together = functools.reduce(lambda a, b: a + b, pieces)
    value, of_pieces, *each = torch.stack([mean.value.detach() for mean in (whole, together, *pieces)]).tolist()
    narrow = loss.narrow or any(leaf.itemsize < 4 for leaf in tree.leaves(params))
    limit = (NARROW_TOLERANCE if narrow else TOLERANCE) * max(map(abs, (value, *each)))
    # NaN of a piece, such as the mean of no token, is another loss.
    return not math.isfinite(value) or abs(value - of_pieces) <= limit
