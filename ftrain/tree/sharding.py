"""Trees of shards: each rank holds a part of every leaf, so a sum over elements is also a sum over ranks.

Within `over`, `ftrain.tree.global_norm` and `all_finite` return the values of the whole leaves. A 0-d leaf cannot be
divided: every rank has it, and only the first rank counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from ftrain import _torch
from ftrain._context import setting


@dataclass(frozen=True, eq=False)
class Shards:
    """The ranks over which leaves are divided. It stays the same object as long as the division stays the same.

    Args:
        sum: ``tensor -> tensor``, the sum over these ranks.
        is_first: whether this is the first of the ranks.
        shapes: name of a parameter -> shape of the whole parameter.
    """

    sum: Callable[[Tensor], Tensor]
    is_first: bool
    shapes: Mapping[str, tuple[int, ...]]


_shards: ContextVar[Shards | None] = ContextVar("ftrain_shards", default=None)


current = _shards.get
"""``() -> Shards | None``: the ranks over which leaves are divided now; None if leaves are whole."""


def over(shards: Shards | None) -> AbstractContextManager[None]:
    """Return the context in which the leaves of trees are shards; with None they are whole."""
    return setting(_shards, shards)


def abstract(leaves: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return tensors without values (`FakeTensor`): the dtype and device of each leaf, and the shape in `shapes`."""
    with _torch.without_modes(), _torch.FakeTensorMode():
        pairs = zip(leaves, shapes, strict=True)
        return [torch.empty(tuple(shape), dtype=leaf.dtype, device=leaf.device) for leaf, shape in pairs]


def wholes(names: Sequence[str], params: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors without values in the shapes of the whole parameters. Outside `over`, return `params`.

    A tensor whose name is that of no parameter keeps its shape.
    """
    shards = current()
    if shards is None:
        return list(params)
    return abstract(params, [shards.shapes.get(name, leaf.shape) for name, leaf in zip(names, params, strict=True)])
