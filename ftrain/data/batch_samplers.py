"""Ways to divide a window of indices into batches, and each batch into the parts of the ranks.

Every rank gets the same number of batches, so that no rank waits for another that has no batch left.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Protocol

import numpy as np

from ftrain.data.permutation import Indices
from ftrain.data.sample_lengths import Lengths
from ftrain.errors import DataError


class BatchSampler(Protocol):
    """Divides the indices of a window into the batches of one rank."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share a batch."""

    @property
    def granularity(self) -> int:
        """With ``drop_last``, the number of samples that are used is a multiple of this."""

    @property
    def window_size(self) -> int:
        """The number of samples in a window; a multiple of `granularity`."""

    @property
    def fixed_size(self) -> bool:
        """Whether every batch has `granularity` samples on all ranks together."""

    def __call__(self, indices: Indices) -> list[Indices]:
        """Return the batches of this rank."""


@dataclass(frozen=True)
class FixedSizeBatchSampler:
    """Batches of a fixed size in the given order; a window is one batch."""

    batch_size: int
    rank: int
    num_ranks: int
    fixed_size: bool = True

    @cached_property
    def granularity(self) -> int:
        """The number of samples in a batch on all ranks."""
        return self.batch_size * self.num_ranks

    @property
    def window_size(self) -> int:
        """The number of samples in a batch on all ranks."""
        return self.granularity

    def __call__(self, indices: Indices) -> list[Indices]:
        """Return the one batch, of which this rank has every `num_ranks`-th sample."""
        return [indices[self.rank :: self.num_ranks]]


@dataclass(frozen=True)
class LengthGroupedBatchSampler:
    """Batches of a fixed size, of samples of similar lengths."""

    batch_size: int
    rank: int
    num_ranks: int
    lengths: Lengths
    min_window_size: int
    fixed_size: bool = True

    @property
    def granularity(self) -> int:
        """The number of samples in a batch on all ranks."""
        return self.batch_size * self.num_ranks

    @property
    def window_size(self) -> int:
        """`min_window_size`, rounded up to whole batches."""
        return -(-self.min_window_size // self.granularity) * self.granularity

    def __call__(self, indices: Indices) -> list[Indices]:
        """Return samples of neighbouring lengths; the ranks get samples of similar lengths."""
        indices = indices[np.argsort(self.lengths(indices), kind="stable")]
        starts = range(0, len(indices), self.granularity)
        global_batches = [indices[start : start + self.granularity] for start in starts]
        return [batch[self.rank :: self.num_ranks] for batch in global_batches]


@dataclass(frozen=True)
class MaxTokensBatchSampler:
    """Batches of samples of similar lengths, with at most so many tokens (rows times the longest row) on each rank."""

    max_tokens: int
    max_rows: int | None
    rank: int
    num_ranks: int
    lengths: Lengths
    min_window_size: int
    fixed_size: bool = False

    @property
    def granularity(self) -> int:
        """One sample for each rank."""
        return self.num_ranks

    @property
    def window_size(self) -> int:
        """`min_window_size`, rounded up to a multiple of the number of ranks."""
        return -(-self.min_window_size // self.granularity) * self.granularity

    def __call__(self, indices: Indices) -> list[Indices]:
        """Return samples of neighbouring lengths, as many rows as the longest of them allows.

        Raises:
            DataError: if one sample alone has more than `max_tokens`.
        """
        lengths = self.lengths(indices)
        order = np.argsort(lengths, kind="stable")
        indices, lengths = indices[order], lengths[order]
        if len(lengths) and lengths[-1] > self.max_tokens:
            raise DataError(
                f"loader: sample {indices[-1]} has {lengths[-1]} tokens, more than max_tokens={self.max_tokens}; cut "
                "it, leave it out, or raise max_tokens"
            )
        # Row k holds one sample for every rank; lengths rise, so its last sample is its longest.
        row_lengths = lengths[self.num_ranks - 1 :: self.num_ranks]
        mine = indices[self.rank :: self.num_ranks]
        starts = _batch_starts([int(length) for length in row_lengths], self.max_tokens, self.max_rows)
        return [mine[start:stop] for start, stop in zip(starts, [*starts[1:], len(mine)], strict=True)]


def _batch_starts(rising_lengths: list[int], max_tokens: int, max_rows: int | None) -> list[int]:
    """Return the rows at which batches start."""
    starts: list[int] = []
    for row, length in enumerate(rising_lengths):
        num_rows = row - starts[-1] + 1 if starts else 0
        if not starts or num_rows * length > max_tokens or (max_rows is not None and num_rows > max_rows):
            starts.append(row)
    return starts


@dataclass(frozen=True)
class PackingBatchSampler:
    """Batches of a fixed number of rows of one length, each filled with whole documents."""

    rows: int
    row_length: int
    rank: int
    num_ranks: int
    lengths: Lengths
    window_size: int
    fixed_size: bool = False
    granularity: int = 1

    def __call__(self, indices: Indices) -> list[Indices]:
        """Return documents row by row; in the last batch of a window, some rows may be empty.

        Raises:
            DataError: if a document is longer than a row.
        """
        rows = _best_fit_decreasing(indices, self.lengths(indices), self.row_length)
        step = self.rows * self.num_ranks
        global_batches = [rows[start : start + step] for start in range(0, len(rows), step)]
        # `pack` places documents one after another, and so restores these rows, or needs fewer of them.
        return [
            np.array(list(chain.from_iterable(batch[self.rank :: self.num_ranks])), dtype=np.int64)
            for batch in global_batches
        ]


def _best_fit_decreasing(indices: Indices, lengths: Indices, row_length: int) -> list[list[int]]:
    """Return the documents of each row: the longest first, each in the fullest row that has room for it.

    Empty documents are left out.
    """
    rows: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (space, row), sorted
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
