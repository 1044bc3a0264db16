"""Divide a window of indices into batches, and each batch among the ranks.

Every rank gets the same number of batches, so that no rank waits for another that has no batch left.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from ftrain.data.permutation import Indices
from ftrain.errors import DataError

Lengths: TypeAlias = Callable[[Indices], Indices]
"""A function that returns the lengths of the samples with some indices."""


@dataclass(frozen=True)
class BatchSampler:
    """Divides the indices of a window into the batches of one rank."""

    divide: Callable[[Any], list[Any]]
    """A function of the indices of a window that returns the indices of each batch of this rank."""
    num_ranks: int
    granularity: int
    """`window_size` is a multiple of this number, and so is the number of samples that ``drop_last`` keeps."""
    window_size: int
    fixed_size: bool
    """Whether every batch has `granularity` samples on all ranks together."""
    keeps_order: bool = False
    """Whether a window is one batch, in order. `divide` then takes lists too."""


def in_order(batch_size: int, rank: int, num_ranks: int) -> BatchSampler:
    """Return batches of a fixed size in the given order; each rank gets a slice of each batch."""
    size = batch_size * num_ranks

    def divide(indices: Sequence[int]) -> list[Sequence[int]]:
        count = len(indices)
        return [indices[count * rank // num_ranks : count * (rank + 1) // num_ranks]]

    return BatchSampler(divide, num_ranks, size, size, fixed_size=True, keeps_order=True)


def by_length(batch_size: int, rank: int, num_ranks: int, *, lengths: Lengths, window_size: int) -> BatchSampler:
    """Return batches of a fixed size, of samples of similar lengths."""
    size = batch_size * num_ranks

    def divide(indices: Indices) -> list[Indices]:
        indices = indices[np.argsort(lengths(indices), kind="stable")]
        return [indices[start : start + size][rank::num_ranks] for start in range(0, len(indices), size)]

    return BatchSampler(divide, num_ranks, size, _round_up(window_size, size), fixed_size=True)


def by_tokens(
    max_tokens: int, max_rows: int | None, rank: int, num_ranks: int, *, lengths: Lengths, window_size: int
) -> BatchSampler:
    """Return batches of samples of similar lengths, of at most `max_tokens` (rows times the longest row) on each rank.

    Raises a DataError, from `BatchSampler.divide`, if one sample alone has more.
    """

    def divide(indices: Indices) -> list[Indices]:
        sizes = lengths(indices)
        order = np.argsort(sizes, kind="stable")
        indices, sizes = indices[order], sizes[order]
        if len(sizes) and sizes[-1] > max_tokens:
            raise DataError(
                f"loader: sample {indices[-1]} has {sizes[-1]} tokens, more than max_tokens={max_tokens}; cut it, "
                "leave it out, or raise max_tokens"
            )
        # Row k of a batch takes one sample for each rank. Lengths ascend, so the last of these samples is the longest.
        row_lengths = [int(size) for size in sizes[num_ranks - 1 :: num_ranks]]
        starts = _batch_starts(row_lengths, max_tokens, max_rows)
        rows = indices[rank::num_ranks]
        return [rows[start:stop] for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)]

    return BatchSampler(divide, num_ranks, num_ranks, _round_up(window_size, num_ranks), fixed_size=False)


def _batch_starts(ascending_lengths: list[int], max_tokens: int, max_rows: int | None) -> list[int]:
    """Return the rows at which batches start: each batch takes as many rows as the limits allow."""
    starts: list[int] = []
    for row, length in enumerate(ascending_lengths):
        num_rows = row - starts[-1] + 1 if starts else 0
        if not starts or num_rows * length > max_tokens or (max_rows is not None and num_rows > max_rows):
            starts.append(row)
    return starts


def by_packing(
    num_rows: int, row_length: int, rank: int, num_ranks: int, *, lengths: Lengths, window_size: int
) -> BatchSampler:
    """Return batches of `num_rows` rows, each filled with whole documents; the last of a window may have empty rows.

    `BatchSampler.divide` raises a DataError if a document is longer than a row.
    """

    def divide(indices: Indices) -> list[Indices]:
        rows = _best_fit_decreasing(indices, lengths(indices), row_length)
        step = num_rows * num_ranks
        global_batches = [rows[start : start + step] for start in range(0, len(rows), step)]
        # `pack` gets the documents without the rows. It fills rows in order, so it makes the same rows, or fewer.
        return [np.array(list(chain.from_iterable(batch[rank::num_ranks])), dtype=np.int64) for batch in global_batches]

    return BatchSampler(divide, num_ranks, 1, window_size, fixed_size=False)


def _best_fit_decreasing(indices: Indices, lengths: Indices, row_length: int) -> list[list[int]]:
    """Return the documents of each row: the longest first, each in the fullest row that has room for it.

    Empty documents are left out.
    """
    rows: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (free tokens, row), sorted: a binary search finds the fullest row.
    for k in np.argsort(-lengths, kind="stable"):
        length = int(lengths[k])
        if length > row_length:
            raise DataError(
                f"loader: document {indices[k]} has {length} tokens, more than pack={row_length}; split the document, "
                "or make rows longer"
            )
        if not length:
            break
        fullest = bisect.bisect_left(free_space, (length, 0))
        if fullest < len(free_space):
            space, row = free_space.pop(fullest)
        else:
            space, row = row_length, len(rows)
            rows.append([])
        rows[row].append(int(indices[k]))
        bisect.insort(free_space, (space - length, row))
    return rows


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def lengths_function(lengths: Sequence[int] | Callable[[int], int], num_samples: int) -> Lengths:
    """Return a function from an array of indices to lengths, for the lengths of all samples or a function of an index.

    Raises a DataError, also in the function, if they are not whole numbers of at least 0.
    """
    if callable(lengths):
        return lambda indices: _checked([_length(lengths, int(index)) for index in indices], len(indices))
    table = _checked(lengths, num_samples)
    return lambda indices: table[indices]


def _length(lengths: Callable[[int], int], index: int) -> int:
    """Return the length of a sample by a function of the user. Raises a DataError in place of its errors."""
    try:
        return lengths(index)
    except Exception as error:
        raise DataError(
            f"loader: lengths({index}) raised {type(error).__name__}: {error}; needs a function of the index of a "
            "sample that returns its number of tokens, such as lambda index: len(dataset[index])"
        ) from error


def _checked(lengths: Sequence[int], count: int) -> Indices:
    """Return lengths as an int64 array. Raises a DataError unless they are `count` whole numbers of at least 0."""
    try:
        table = np.asarray(lengths)
    except ValueError as error:
        raise DataError(f"loader: lengths are no array: {error}; needs the number of tokens of each sample") from error
    if table.shape != (count,) or (count and (table.dtype.kind not in "iu" or table.min() < 0)):
        least = f", the least is {table.min()}" if table.size and table.dtype.kind in "iuf" else ""
        raise DataError(
            f"loader: lengths have shape {table.shape} and dtype {table.dtype}{least}; needs {count} whole numbers of "
            "at least 0, the number of tokens of each sample"
        )
    return table.astype(np.int64, copy=False)
