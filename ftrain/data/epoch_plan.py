"""Which samples make which batch: windows of the order are cut into batches, each a pure function of its number.

A pass is a row of windows, and a window is cut into batches without a look at any other. So a position is a window
and a batch in it, and to find it again costs one window, wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ftrain import random
from ftrain.data import rng_streams
from ftrain.data.batch_samplers import Cut
from ftrain.data.permutation import ORDERS, Indices, stretch


@dataclass(frozen=True)
class Request:
    """A batch that is wanted.

    Args:
        epoch: the pass.
        indices: of its samples.
        after: where the pass stands when it has been yielded: a window, and a batch in it.
    """

    epoch: int
    indices: list[int]
    after: tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """All batches of one rank, in every pass.

    Args:
        size: how many samples there are.
        cut: how a window is cut into batches.
        seed: of the order.
        shuffle: whether the order is shuffled; else it is that of the data.
        drop_last: whether the samples are left out that make no whole batch; else they are shared out among the
            ranks, and when there are fewer than ranks, the first ones of the pass are repeated to make up for it.
        order: the version of the order, of `ORDERS`.
    """

    size: int
    cut: Cut
    seed: int
    shuffle: bool
    drop_last: bool
    order: int = 2

    @property
    def used(self) -> int:
        """How many samples a pass goes through, repeated ones aside."""
        return self.size - self.size % self.cut.quantum if self.drop_last else self.size

    @property
    def num_windows(self) -> int:
        """How many windows a pass has."""
        return -(-self.used // self.cut.width)

    @property
    def num_batches(self) -> int | None:
        """How many batches a pass has; None where this depends on the lengths of all samples."""
        return -(-self.used // self.cut.quantum) if self.cut.fixed else None

    def window(self, epoch: int, number: int) -> list[Indices]:
        """Return the batches of a window, as the indices of their samples."""
        first = number * self.cut.width
        count = min(self.cut.width, self.used - first)
        rest = count % self.cut.quantum
        if rest:
            count += max(self.cut.num_ranks - rest, 0)
        batches = self.cut(self._index(epoch, first, count))
        if not self.shuffle or len(batches) == 1:
            return batches
        key = random.fold_in_words(rng_streams.stream(self.seed, epoch, rng_streams.WINDOW), number)
        return [batches[i] for i in ORDERS[self.order](np.arange(len(batches)), len(batches), key)]

    def _index(self, epoch: int, first: int, count: int) -> Indices:
        """What the order has from a place on; it begins again at its end."""
        if not self.shuffle:
            return np.arange(first, first + count) % self.size
        order, words = ORDERS[self.order], rng_streams.stream(self.seed, epoch, rng_streams.ORDER)
        if first + count <= self.size:
            return stretch(order, first, count, self.size, words)
        return order(np.arange(first, first + count) % self.size, self.size, words)

    def requests(self, epoch: int, window: int, batch: int) -> Iterator[Request]:
        """Ask for the batches of a pass, from a position on."""
        for number in range(window, self.num_windows):
            batches = self.window(epoch, number)
            for k in range(batch, len(batches)):
                after = (number, k + 1) if k + 1 < len(batches) else (number + 1, 0)
                yield Request(epoch, list(map(int, batches[k])), after)
            batch = 0
