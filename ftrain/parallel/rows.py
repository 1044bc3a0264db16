"""The examples that a rank computes on: the batch of all ranks is cut along its first axis, one part per rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftrain import random, tree
from ftrain.parallel.mesh import Group
from ftrain.random import torch_ops
from ftrain.step.microbatch import split_batch, split_leaves
from ftrain.types import STATIC, Mean, PyTree, tree_class


@tree_class
@dataclass(frozen=True)
class Rows:
    """The examples of a batch that one rank computes on: the same rows of each microbatch.

    Args:
        batch: these examples, microbatch by microbatch. Without examples, the first one of each microbatch, which
            must not count.
        start: the number of the first of them in its microbatch.
        length: number of these examples in each microbatch.
        total: number of examples of a microbatch on all ranks.
        consecutive: number of these examples that are consecutive in the batch of all ranks.
        microbatches: number of microbatches.
        ranks: all ranks; None if nothing that computes on the rows communicates.
    """

    batch: PyTree
    start: int = field(metadata=STATIC)
    length: int = field(metadata=STATIC)
    total: int = field(metadata=STATIC)
    consecutive: int = field(metadata=STATIC)
    microbatches: int = field(metadata=STATIC)
    ranks: Group | None = field(default=None, metadata=STATIC)

    def key(self, key: Tensor | None) -> Tensor | None:
        """Return the key with which these examples draw as in the whole batch, given the key of the whole batch."""
        if key is None:
            return None
        key_data, first = (key, 0) if key.shape[0] == 2 else (key[:2], key[2])
        return random.for_examples(key_data, self._number_of(first), max(self.length, 1))

    @contextmanager
    def stock_draws(self) -> Iterator[None]:
        """Context in which torch's random operations draw the same for these examples as in the whole batch."""
        stream = torch_ops.current()
        if stream is None:
            yield
            return
        first = stream.examples[0] if stream.examples is not None else 0
        with stream.for_examples(self._number_of(first) - first, max(self.length, 1), stream.offset):
            yield

    def weighted(self, mean: Mean) -> Mean:
        """Return a loss with its weight: that of a plain number is the number of examples; 0 without examples."""
        if self.length == 0:
            return Mean(mean.total * 0, mean.weight.detach() * 0)
        return Mean(mean.total * self.length, mean.weight * self.length) if mean.plain else mean

    def share_of(self, value: Any) -> Any:
        """Return what these examples add to a mean over all; without examples 0, even if the value is NaN."""
        if not isinstance(value, Tensor):
            return value
        value = value if value.is_floating_point() else value.float()
        return value * (self.length / self.total) if self.length else torch.zeros_like(value)

    def _number_of(self, first: int | Tensor) -> int | Tensor:
        """Return the number in the whole batch of the first example of a microbatch, given its number among these."""
        each = max(self.consecutive, 1)
        return first // each * self.total + first % each + self.start


_current: ContextVar[Rows | None] = ContextVar("ftrain_rows", default=None)


def current() -> Rows | None:
    """Return the rows that a rank computes on; None outside a step of many ranks."""
    return _current.get()


@contextmanager
def computing_on(rows: Rows) -> Iterator[None]:
    """Context in which a rank computes on some rows."""
    token = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(token)


def rows_of(batch: PyTree, rank: int, size: int, microbatches: int, device: torch.device) -> Rows:
    """Return the rows of one rank: parts in the order of ranks whose lengths differ by at most one.

    What `split_batch` does not split goes to every rank. Only these rows are copied to `device`; if they are there
    and there is one microbatch, they are views of the batch.

    Raises:
        BatchError: for tensors whose first axes differ in length or are not divided by the microbatches, or a batch
            without any example.
    """
    columns, spec = split_leaves(batch, microbatches, _splitting(microbatches))
    total = (tree.batch_length(batch) or 0) // microbatches
    each, more = divmod(total, size)
    start, length = rank * each + min(rank, more), each + (rank < more)
    rows_taken = slice(start, start + length) if length else slice(0, 1)

    def rows(first: Any, *more: Any) -> Any:
        if isinstance(first, list | tuple):
            return type(first)(itertools.chain.from_iterable(piece[rows_taken] for piece in (first, *more)))
        if isinstance(first, np.ndarray) and first.ndim:
            return np.concatenate([piece[rows_taken] for piece in (first, *more)])
        if not tree.is_tensor(first):
            return first
        if first.ndim:
            first = torch.cat([piece[rows_taken] for piece in (first, *more)]) if more else first[rows_taken]
        return first.to(device, non_blocking=True)

    own_batch = tree.unflatten(spec, [rows(*pieces) for pieces in columns])
    return Rows(own_batch, start, length, total, length, microbatches)


def own_rows(batch: PyTree, rank: int, size: int, microbatches: int, device: torch.device) -> Rows:
    """Return the rows of one rank, given its own examples on `device`; those of all ranks are one batch.

    Raises:
        BatchError: for tensors whose first axes differ in length or are not divided by the microbatches, or a batch
            without any example.
    """
    pieces = split_batch(batch, microbatches, require_equal=_splitting(microbatches))
    length = tree.batch_length(pieces[0]) or 0
    start = rank * length * microbatches
    return Rows(batch, start, length, length * size, length * microbatches, microbatches)


def _splitting(microbatches: int) -> str:
    """Return the name of the function that splits a batch, for errors."""
    return f"accumulate({microbatches})" if microbatches > 1 else "sharded"
