"""The examples on which a rank computes: the batch of all ranks is cut along its first axis, one part per rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftrain import random, tree
from ftrain._context import setting
from ftrain.parallel.mesh import Group
from ftrain.random import torch_ops
from ftrain.step.loss_forms import as_float
from ftrain.step.microbatch import (
    ExampleLists,
    example_lists,
    pieces_of_fewest,
    require_rows,
    split_leaves,
    with_example_lists,
)
from ftrain.types import STATIC, Mean, PyTree, replace, tree_class


@tree_class
@dataclass(frozen=True)
class Rows:
    """The examples of a batch on which one rank computes: the same rows of each microbatch.

    If the number of microbatches does not divide the batch, a rank takes rows of the whole batch, and splits them
    itself. Then `fewest` is set, and `start`, `length` and `total` are counted in the whole batch.

    Args:
        batch: the examples of this rank, microbatch by microbatch. A rank without examples has the first one of each
            microbatch, with a weight of 0.
        start: index in its microbatch of the first example of this rank.
        length: number of examples of this rank in each microbatch; 0 without examples.
        total: number of examples of a microbatch on all ranks.
        consecutive: number of examples of this rank that are consecutive in the batch of all ranks.
        microbatches: number of microbatches.
        fewest: number of examples of the rank that has fewest, if each rank splits its own; else None.
        lists: as `example_lists` returns.
        ranks: all ranks; None if nothing that computes on the rows communicates.
    """

    batch: PyTree
    start: int = field(metadata=STATIC)
    length: int = field(metadata=STATIC)
    total: int = field(metadata=STATIC)
    consecutive: int = field(metadata=STATIC)
    microbatches: int = field(metadata=STATIC)
    fewest: int | None = field(default=None, metadata=STATIC)
    lists: ExampleLists = field(default=frozenset(), metadata=STATIC)
    ranks: Group | None = field(default=None, metadata=STATIC)

    def of_microbatch(self, batch: PyTree) -> Rows:
        """Return the rows of one microbatch, given its batch."""
        if self.fewest is None or self.length == 0:
            return self
        return replace(self, length=tree.batch_length(batch) or 1)

    def key(self, key: Tensor | None) -> Tensor | None:
        """Return the key with which these examples draw as in the whole batch, given the key of the whole batch."""
        if key is None:
            return None
        # The key of a microbatch also has the index of its first example.
        key_data, first = (key, 0) if key.shape[0] == 2 else (key[:2], key[2])
        return random.for_examples(key_data, self._index_in_batch(first), max(self.length, 1))

    @contextmanager
    def stock_draws(self) -> Iterator[None]:
        """Context in which torch's random operations draw the same for these examples as in the whole batch."""
        stream = torch_ops.current()
        if stream is None:
            yield
            return
        first = stream.examples[0] if stream.examples is not None else 0
        with stream.for_examples(self._index_in_batch(first) - first, max(self.length, 1), stream.offset):
            yield

    def weighted(self, mean: Mean) -> Mean:
        """Return a loss with its weight on this rank. A plain number has the number of examples as its weight.

        Without examples the weight is 0.
        """
        if mean.plain:
            # Multiplied by the weight, which has 32 bits or more, the total does not overflow in float16.
            weight = mean.weight * self.length
            return Mean(mean.total * weight, weight)
        return mean if self.length else Mean(mean.total * 0, mean.weight.detach() * 0)

    def weighted_metric(self, metric: Any) -> Any:
        """Return a metric with its weight. If microbatches differ in size, a number becomes a `Mean` over examples."""
        if self.fewest is not None and isinstance(metric, Tensor | Number):
            metric = as_float(torch.as_tensor(metric))
            metric = Mean(metric, metric.new_ones((), dtype=torch.float32), plain=True)
        return self.weighted(metric) if isinstance(metric, Mean) else metric

    def total_weight(self, mean: Mean) -> Tensor | None:
        """Return the weight of a loss on all ranks if it is known: a plain number has 1 per example; else None."""
        return mean.weight.new_full((), self.total) if mean.plain and self.fewest is None else None

    def share_of(self, value: Any) -> Any:
        """Return what this rank adds to the mean of a value over all examples; 0 without examples, even for NaN."""
        if not isinstance(value, Tensor):
            return value
        value = as_float(value)
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        return value * (self.length / self.total) if self.length else torch.zeros_like(value)

    def _index_in_batch(self, first: int | Tensor) -> int | Tensor:
        """Return the index in the batch of all ranks of an example, given its index among those of this rank."""
        consecutive = max(self.consecutive, 1)
        return first // consecutive * self.total + first % consecutive + self.start


_current: ContextVar[Rows | None] = ContextVar("ftrain_rows", default=None)


current = _current.get
"""``() -> Rows | None``: the rows on which this rank computes; None outside a step of many ranks."""


@contextmanager
def computing_on(rows: Rows) -> Iterator[None]:
    """Context in which this rank computes on `rows`, or on a piece of them."""
    with setting(_current, rows), with_example_lists(rows.lists):
        yield


def rows_of(
    batch: PyTree, rank: int, size: int, splits: Sequence[int], device: torch.device, *, is_whole: bool = True
) -> Rows:
    """Return the rows of one rank. Ranks have consecutive rows of each microbatch; their numbers differ by at most one.

    Leaves that `split_batch` does not split go to every rank. Only the rows of this rank are copied to `device`; if
    they are there and there is one microbatch, they are views of the batch. A single rank has the batch itself. Raises
    a BatchError as `require_rows` does.

    The batch is that of all ranks if it `is_whole`, else that of this rank, on `device`. `splits` are the numbers of
    pieces into which wrappers split it: the first wrapper the batch, the second each piece, and so on.
    """
    microbatches = math.prod(splits)
    count = tree.batch_length(batch) or 0
    if count % microbatches:
        rows = rows_of(batch, rank, size, (), device, is_whole=is_whole)
        return _split_by_rank(rows, rows.total // size, splits)
    require_rows(batch, f"accumulate({microbatches})" if microbatches > 1 else "sharded")
    lists, length = example_lists(batch), count // microbatches
    if not is_whole or size == 1:
        # This rank has all rows of each microbatch, and these are the batch: nothing is cut or copied.
        own_batch = tree.to(batch, device) if is_whole else batch
        return Rows(own_batch, rank * count, length, length * size, count, microbatches, lists=lists)
    # The first `longer` ranks have one row more.
    shortest, longer = divmod(length, size)
    start = rank * shortest + min(rank, longer)
    own_length = shortest + (rank < longer)
    own_rows = slice(start, start + own_length) if own_length else slice(0, 1)
    columns, spec = split_leaves(batch, microbatches)
    own_batch = tree.unflatten(spec, [_joined(pieces, own_rows, device) for pieces in columns])
    return Rows(own_batch, start, own_length, length, own_length, microbatches, lists=lists)


def _joined(pieces: Sequence[Any], own_rows: slice, device: torch.device) -> Any:
    """Return the rows `own_rows` of all pieces of a leaf, joined to one leaf."""
    first = pieces[0]
    if isinstance(first, list | tuple):
        return type(first)(itertools.chain.from_iterable(piece[own_rows] for piece in pieces))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate([piece[own_rows] for piece in pieces])
    if not tree.is_tensor(first):
        return first
    if first.ndim:
        first = torch.cat([piece[own_rows] for piece in pieces]) if len(pieces) > 1 else first[own_rows]
    return first.to(device, non_blocking=True)


def _split_by_rank(rows: Rows, fewest: int, splits: Sequence[int]) -> Rows:
    """Return `rows` with the number of microbatches into which each rank splits its own rows."""
    microbatches = 1
    length = fewest
    for split in splits:
        pieces = pieces_of_fewest(split, length)
        microbatches *= pieces
        length //= pieces
    return replace(rows, microbatches=microbatches, fewest=fewest)
