"""Ways to cut a window of the order into batches, and each batch into the parts of the ranks.

Every rank gets the same number of batches, so that ranks that wait for each other never wait for nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from ftrain.data.permutation import Indices
from ftrain.errors import DataError

Lengths = Callable[[Indices], Indices]
"""The lengths of the samples with these indices."""


class Cut(Protocol):
    """Cuts the samples of a window into the batches of one rank."""

    @property
    def num_ranks(self) -> int:
        """How many ranks share a batch."""

    @property
    def quantum(self) -> int:
        """How many samples make a whole: what is left over is less than that."""

    @property
    def width(self) -> int:
        """How many samples a window has: some quanta."""

    @property
    def fixed(self) -> bool:
        """Whether each quantum is one batch."""

    def __call__(self, index: Indices) -> list[Indices]:
        """Return the batches of this rank."""


@dataclass(frozen=True)
class InOrder:
    """Batches of a fixed size, as the samples come."""

    batch_size: int
    rank: int
    num_ranks: int
    fixed: bool = True

    @property
    def quantum(self) -> int:
        """The samples of a batch on all ranks."""
        return self.batch_size * self.num_ranks

    @property
    def width(self) -> int:
        """One batch."""
        return self.quantum

    def __call__(self, index: Indices) -> list[Indices]:
        """Return the one batch, every so many samples of which are this rank's."""
        return [index[self.rank :: self.num_ranks]]


@dataclass(frozen=True)
class ByLength:
    """Batches of a fixed size, of samples that are about as long as each other."""

    batch_size: int
    rank: int
    num_ranks: int
    lengths: Lengths
    window: int
    fixed: bool = True

    @property
    def quantum(self) -> int:
        """The samples of a batch on all ranks."""
        return self.batch_size * self.num_ranks

    @property
    def width(self) -> int:
        """The window, in whole batches."""
        return -(-self.window // self.quantum) * self.quantum

    def __call__(self, index: Indices) -> list[Indices]:
        """Return neighbours by length; all ranks have samples of about the same lengths."""
        index = index[np.argsort(self.lengths(index), kind="stable")]
        whole = [index[start : start + self.quantum] for start in range(0, len(index), self.quantum)]
        return [batch[self.rank :: self.num_ranks] for batch in whole]


@dataclass(frozen=True)
class ByTokens:
    """Batches of as many samples as fit into a number of tokens, padded to the longest."""

    max_tokens: int
    max_rows: int | None
    rank: int
    num_ranks: int
    lengths: Lengths
    window: int
    fixed: bool = False

    @property
    def quantum(self) -> int:
        """A sample for each rank."""
        return self.num_ranks

    @property
    def width(self) -> int:
        """The window, shared by the ranks without a rest."""
        return -(-self.window // self.quantum) * self.quantum

    def __call__(self, index: Indices) -> list[Indices]:
        """Return neighbours by length, as many rows as the longest of them allows.

        Raises:
            DataError: when a sample alone has too many tokens.
        """
        lengths = self.lengths(index)
        order = np.argsort(lengths, kind="stable")
        index, lengths = index[order], lengths[order]
        if len(lengths) and lengths[-1] > self.max_tokens:
            raise DataError(
                f"loader: sample {index[-1]} has {lengths[-1]} tokens, more than max_tokens={self.max_tokens}; cut it, "
                "leave it out, or allow more"
            )
        # Each step takes a sample for every rank; in rising order the last one taken is the longest.
        longest = lengths[self.num_ranks - 1 :: self.num_ranks]
        mine = index[self.rank :: self.num_ranks]
        starts = _starts([int(length) for length in longest], self.max_tokens, self.max_rows)
        return [mine[start:stop] for start, stop in zip(starts, [*starts[1:], len(mine)], strict=True)]


def _starts(longest: list[int], max_tokens: int, max_rows: int | None) -> list[int]:
    """Where batches start, for rising lengths."""
    starts: list[int] = []
    for row, length in enumerate(longest):
        rows = row - starts[-1] + 1 if starts else 0
        if not starts or rows * length > max_tokens or (max_rows is not None and rows > max_rows):
            starts.append(row)
    return starts


@dataclass(frozen=True)
class ByRoom:
    """Batches of a fixed number of rows, each filled with whole documents: the longest first, where there is room."""

    rows: int
    room: int
    rank: int
    num_ranks: int
    lengths: Lengths
    window: int
    fixed: bool = False
    quantum: int = 1

    @property
    def width(self) -> int:
        """The window."""
        return self.window

    def __call__(self, index: Indices) -> list[Indices]:
        """Return documents row by row; in the last batch of a window, some rows may be empty.

        Raises:
            DataError: when a document is longer than a row.
        """
        rows = _filled(index, self.lengths(index), self.room)
        step = self.rows * self.num_ranks
        whole = [rows[start : start + step] for start in range(0, len(rows), step)]
        # Put in a row one after another, they fall into the same rows again or into fewer: see `pack`.
        return [
            np.array(list(chain.from_iterable(batch[self.rank :: self.num_ranks])), dtype=np.int64) for batch in whole
        ]


def _filled(index: Indices, lengths: Indices, room: int) -> list[list[int]]:
    """Best fit, in falling order of the lengths; documents without a token take no room, and are left out."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for k in np.argsort(-lengths, kind="stable"):
        length = int(lengths[k])
        if length > room:
            raise DataError(
                f"loader: document {index[k]} has {length} tokens, more than pack={room}; cut it into pieces before, "
                "or make rows longer"
            )
        if not length:
            break
        place = bisect.bisect_left(free, (length, 0))
        if place < len(free):
            left, row = free.pop(place)
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(int(index[k]))
        bisect.insort(free, (left - length, row))
    return rows
