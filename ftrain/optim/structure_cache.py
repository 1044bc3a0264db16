"""Cache a value that is computed from the structure of trees and the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import optree
from torch import Tensor

from ftrain import _torch
from ftrain.errors import StructureError
from ftrain.tree import sharding
from ftrain.tree.fast_flatten import Flattener
from ftrain.tree.sharding import Shards
from ftrain.types import PyTree

T = TypeVar("T")


class _Cached(NamedTuple, Generic[T]):
    shards: Shards | None
    spec: optree.PyTreeSpec
    is_like: Callable[..., bool]
    slices: list[slice]
    value: T


class StructureCache(Generic[T]):
    """Caches ``compute(specs, columns)``, where `specs` and `columns` are the structure and the leaves of each tree.

    The value may depend on the shapes, strides, dtypes and devices of the leaves, and on how they are divided over
    ranks (`ftrain.tree.sharding`). Only the value of the last trees is kept: the next ones usually are like them.
    """

    def __init__(self, compute: Callable[[Sequence[optree.PyTreeSpec], list[list[Tensor]]], T]) -> None:
        self._compute = compute
        self._flatten = Flattener()
        self._last: _Cached[T] | None = None

    def __call__(self, *trees: PyTree) -> tuple[T, list[list[Tensor]]]:
        """Return the value for these trees, and the leaves of each of them."""
        leaves, spec = self._flatten(trees)
        last, shards = self._last, sharding.current()
        if last is None or last.spec is not spec or last.shards is not shards or not last.is_like(*leaves):
            specs = spec.children()
            ends = [*accumulate((each.num_leaves for each in specs), initial=0)]
            slices = [slice(start, end) for start, end in pairwise(ends)]
            value = self._compute(specs, [leaves[part] for part in slices])
            last = self._last = _Cached(shards, spec, _torch.tensor_guard(leaves), slices, value)
        return last.value, [*map(leaves.__getitem__, last.slices)]


def common_spec(specs: Sequence[optree.PyTreeSpec]) -> optree.PyTreeSpec:
    """Return the common structure of several trees. Raises a StructureError if they differ."""
    first, *others = specs
    if any(other != first for other in others):
        raise StructureError(
            "optimizer: the trees of parameters, gradients and moments differ in structure; gradients and "
            "optimizer state must be like the parameters"
        )
    return first
