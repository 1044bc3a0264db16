"""Slices of a list of tensors, to compute with a few of them at a time, and parts of large tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LEAST_AT_ONCE = 1 << 20
"""The smallest number of elements in a slice of `slices`: enough to occupy a device."""

MOST_SLICES = 64
"""About the largest number of slices of `slices`."""

PART = 1 << 18
"""The largest number of elements in a tensor of `in_parts`."""


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


def in_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of a CPU with the large ones replaced by parts of at most `PART` elements, for their norms.

    On a CPU torch adds up the squares of a tensor in a few float32 numbers, and a small square does not change a large
    sum: for 2**28 elements the norm is 4% too small. The parts are views if a tensor fills its memory.
    """
    return [part for tensor in tensors for part in (_parts(tensor) if tensor.numel() > PART else (tensor,))]


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.layout != torch.strided or tensor.is_nested:
        return (tensor,)
    in_memory = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return torch.split(in_memory.reshape(-1), PART)
