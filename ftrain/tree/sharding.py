"""Trees of shards: each rank holds a part of every leaf, so a sum over elements is also a sum over ranks.

Within `over`, `ftrain.tree.global_norm` and `all_finite` are those of the whole leaves. A leaf without axis cannot be
divided: every rank has it, and the first one counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shards:
    """The ranks over which leaves are divided.

    Args:
        sum: ``tensor -> tensor``, its sum over these ranks.
        is_first: whether this is the first of the ranks.
    """

    sum: Callable[[Tensor], Tensor]
    is_first: bool


_shards: ContextVar[Shards | None] = ContextVar("ftrain_shards", default=None)


current = _shards.get
"""``() -> Shards | None``: the ranks over which leaves are divided here; None where leaves are whole."""


@contextmanager
def over(shards: Shards | None) -> Iterator[None]:
    """Context in which the leaves of trees are shards; with None they are whole."""
    token = _shards.set(shards)
    try:
        yield
    finally:
        _shards.reset(token)
