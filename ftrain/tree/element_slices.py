"""Slices of a list of tensors, to compute with a few of them at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

LEAST_AT_ONCE = 1 << 20
"""The smallest number of elements in a slice of `slices`: enough to occupy a device."""

MOST_SLICES = 64
"""About the largest number of slices of `slices`."""


def slices(tensors: list[Tensor]) -> Iterator[slice]:
    """Yield slices of a list of tensors, to compute with a few tensors at a time.

    A slice has at least one tensor, and no more elements than `LEAST_AT_ONCE` or 1 / `MOST_SLICES` of all, unless it
    is a single tensor.
    """
    limit = max(LEAST_AT_ONCE, sum(map(Tensor.numel, tensors)) // MOST_SLICES)
    start = size = 0
    for index, tensor in enumerate(tensors):
        if size and size + tensor.numel() > limit:
            yield slice(start, index)
            start, size = index, 0
        size += tensor.numel()
    if start < len(tensors):
        yield slice(start, len(tensors))
