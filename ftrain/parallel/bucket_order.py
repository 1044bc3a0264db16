"""Send gradients in buckets while the backward pass runs; the order of the buckets is the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ftrain import tree
from ftrain.parallel.partition import Part, buckets
from ftrain.types import PyTree

STREAM_BYTES = 1 << 19
"""Bytes of gradients that are sent together, with `update_in_backward`."""


Name = TypeVar("Name", bound=Hashable)


class BucketOrder:
    """Starts the buckets of a plan in their order, each when it and all earlier ones are complete.

    The plan is the same on all ranks. Ranks that use different parameters get their gradients in different orders.
    """

    def __init__(self, plan: Iterable[Sequence[Any]], start: Callable[[Sequence[Any], list[Tensor]], None]) -> None:
        self._plan, self._start = iter(plan), start
        self._waiting: dict[Hashable, Tensor] = {}
        self._advance()

    def take(self, name: Hashable, grad: Tensor) -> None:
        """Take a complete gradient."""
        self._waiting[name] = grad
        self._missing.discard(name)

    def start_complete(self) -> None:
        """Start the buckets that are next and complete."""
        while self._next and not self._missing:
            self._start_next()

    def start_rest(self, zeros: Callable[[Any], Tensor]) -> None:
        """Start the other buckets, with zeros in place of the gradients that this rank does not have."""
        while self._next:
            self._waiting.update((name, zeros(name)) for name in self._missing)
            self._start_next()

    def _start_next(self) -> None:
        names = self._next
        grads = [self._waiting.pop(name) for name in names]
        self._advance()
        self._start(names, grads)

    def _advance(self) -> None:
        self._next: Sequence[Any] = next(self._plan, ())
        self._missing = {name for name in self._next if name not in self._waiting}


def plan_of(names: Sequence[Name], tensors: Sequence[Tensor], sizes: Sequence[int], limit: int) -> list[list[Name]]:
    """Return the names in each bucket of about `limit` bytes.

    The arguments are in the order of use in the forward pass, and `sizes` are numbers of elements. Gradients come in
    the opposite order, and so do the buckets.
    """
    reversed_names = names[::-1]
    return [[reversed_names[index] for index in bucket] for bucket in buckets(tensors[::-1], sizes[::-1], limit)]


def stream_plan(params: PyTree, parts: Sequence[Part | None], order: Iterable[str]) -> list[list[int]]:
    """Return the indices of the leaves in each bucket, for gradients that are taken one by one.

    Ranks plan with the sizes of whole leaves, so that they agree. `order` are the names in the order of their use, as
    far as they are known.
    """
    leaves, names = tree.leaves(params), tree.leaf_names(params)
    rank_of = {name: rank for rank, name in enumerate(order)}
    used = sorted(range(len(leaves)), key=lambda index: rank_of.get(names[index], len(rank_of)))
    sizes = [leaf.numel() if part is None else math.prod(part.shape) for leaf, part in zip(leaves, parts, strict=True)]
    return plan_of(used, [leaves[index] for index in used], [sizes[index] for index in used], STREAM_BYTES)
