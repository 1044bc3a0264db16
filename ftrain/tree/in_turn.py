"""Arithmetic on a few tensors of a list at a time, so that there is no second copy of all in memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ftrain import tree

LEAST_AT_ONCE, MOST_SLICES = 1 << 20, 64
"""Number of elements that are computed at once, which is enough to occupy a device, and number of slices of more."""


def scale_in_turn(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Replace the tensors of a list by those of `ftrain.tree.scale_leaves`.

    Those to which nothing else refers are freed meanwhile.
    """
    if sum(map(Tensor.numel, tensors)) <= LEAST_AT_ONCE:
        tensors[:] = tree.scale_leaves(tensors, factor)
        return
    for part in slices(tensors):
        tensors[part] = tree.scale_leaves(tensors[part], factor)


def slices(tensors: list[Tensor]) -> Iterator[slice]:
    """Yield slices of a list of tensors."""
    limit = max(LEAST_AT_ONCE, sum(map(Tensor.numel, tensors)) // MOST_SLICES)
    start = size = 0
    for index, tensor in enumerate(tensors):
        if size and size + tensor.numel() > limit:
            yield slice(start, index)
            start, size = index, 0
        size += tensor.numel()
    if start < len(tensors):
        yield slice(start, len(tensors))
