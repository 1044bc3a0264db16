"""A rank without memory for its examples takes part in the collectives of a gradient, so that no rank waits for it.

It computes again, on one example of each microbatch, and leaves out the collectives that it had started before. All
ranks start the same ones in the same order, so what it sends meets what the others wait for. The gradient is of no use;
the ranks must agree on that before they update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ftrain import tree
from ftrain._torch.collectives import COUNTERS
from ftrain.parallel.rows import Rows


class StandIn:
    """Counts the collectives of a gradient: a context, in which this rank can take part in those that are left."""

    def __init__(self) -> None:
        self._started = self._to_leave_out = 0
        self._is_counting = False
        self.is_active = False
        """Whether this rank takes part in a gradient for which it has no memory."""
        self._world: Any = None

    def __enter__(self) -> StandIn:
        self._world, self._started = dist.group.WORLD, 0
        COUNTERS[self._world] = self
        return self

    def __exit__(self, *error: object) -> None:
        del COUNTERS[self._world]
        self._is_counting = False

    def begin(self) -> None:
        """Count the collectives from here on, which are those of a gradient."""
        self._started, self._is_counting = 0, True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the gradient that has failed is computed again."""
        self._to_leave_out, self.is_active, self._is_counting = self._started, True, False
        try:
            yield
        finally:
            self._to_leave_out, self.is_active = 0, False

    def leaves_out(self) -> bool:
        """Return whether the next collective is one that was started before."""
        if not self._is_counting or not self._to_leave_out:
            return False
        self._to_leave_out -= 1
        return True

    def has_started(self) -> None:
        """Count a collective that was started."""
        self._started += self._is_counting


def without_examples(rows: Rows) -> Rows:
    """Return the rows of a rank that has none: the first one of each microbatch, which does not count."""
    every = max(rows.length, 1)
    firsts = tree.map(lambda leaf: leaf[::every] if tree.is_tensor(leaf) and leaf.ndim else leaf, rows.batch)
    return replace(rows, batch=firsts, length=0)
