"""Multiply the tensors of a list by a number, all at once or a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ftrain import _torch

LEAST_AT_ONCE = 1 << 20
"""The smallest number of elements in a slice of `slices`: enough to occupy a device."""

MOST_SLICES = 64
"""About the largest number of slices of `slices`."""


def scale_leaves(tensors: list[Tensor], factor: Tensor | float) -> list[Tensor]:
    """`ftrain.tree.scale` for a list of tensors."""
    if _must_scale_one_by_one(tensors, factor):
        return [(tensor * factor).to(tensor.dtype) for tensor in tensors]
    return list(torch._foreach_mul(tensors, factor)) if tensors else []


def scale_leaves_(tensors: list[Tensor], factor: Tensor | float) -> list[Tensor]:
    """`scale_leaves` in place."""
    if _must_scale_one_by_one(tensors, factor):
        return [tensor.mul_(factor) for tensor in tensors]
    if tensors:
        torch._foreach_mul_(tensors, factor)
    return tensors


def _must_scale_one_by_one(tensors: list[Tensor], factor: Tensor | float) -> bool:
    # `_foreach_mul` returns 0-d tensors in the dtype of the factor if that is wider, and integers as float32.
    if isinstance(factor, Tensor):
        return any(tensor.dtype != factor.dtype for tensor in tensors)
    return any(_torch.foreach_rounds(tensor) or not tensor.is_floating_point() for tensor in tensors)


def scale_in_turn(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Replace the tensors of a list by those of `scale_leaves`, one slice of the list after the other.

    Old tensors to which nothing else refers are freed after each slice, so that there is never a second copy of all.
    """
    if sum(map(Tensor.numel, tensors)) <= LEAST_AT_ONCE:
        tensors[:] = scale_leaves(tensors, factor)
        return
    for part in slices(tensors):
        tensors[part] = scale_leaves(tensors[part], factor)


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
