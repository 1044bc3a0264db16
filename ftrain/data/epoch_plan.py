"""The batches of an epoch as indices of samples: a pure function of seed, epoch and position.

An epoch is a sequence of windows of the (shuffled) order, and each window is divided into batches by itself. So a
position is the number of a window and the number of a batch in it, and resuming computes only one window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ftrain import random
from ftrain.data import rng_streams
from ftrain.data.batch_samplers import BatchSampler
from ftrain.data.fetched_batch import Position
from ftrain.data.permutation import BLOCK, Indices, permuted


class BatchRequest(NamedTuple):
    """A batch to be read: the epoch, the indices of its samples, and the position after it."""

    epoch: int
    indices: list[int]
    position: Position


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one rank in every epoch.

    With ``drop_last`` the last samples are left out if they do not fill a batch on all ranks. Otherwise they are
    divided among the ranks; if there are fewer samples than ranks, the first samples of the epoch are repeated.
    """

    num_samples: int
    batch_sampler: BatchSampler
    seed: int
    shuffle: bool
    drop_last: bool

    @cached_property
    def num_used(self) -> int:
        """The number of samples that are read in an epoch, without those that are repeated."""
        dropped = self.num_samples % self.batch_sampler.granularity if self.drop_last else 0
        return self.num_samples - dropped

    @property
    def num_windows(self) -> int:
        """The number of windows in an epoch."""
        return -(-self.num_used // self.batch_sampler.window_size)

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if it depends on the lengths of all samples."""
        sampler = self.batch_sampler
        return -(-self.num_used // sampler.granularity) if sampler.fixed_size else None

    def window(self, epoch: int, number: int) -> list[Indices]:
        """Return the batches of a window, each as the indices of its samples."""
        sampler = self.batch_sampler
        first = number * sampler.window_size
        count = min(sampler.window_size, self.num_used - first)
        remainder = count % sampler.granularity
        if remainder:
            count += max(sampler.num_ranks - remainder, 0)
        batches = sampler.divide(self._indices(epoch, first, count))
        if not self.shuffle or len(batches) == 1:
            return batches
        key_data = random.fold_in_key_data(rng_streams.stream(self.seed, epoch, rng_streams.WINDOW), number)
        return [batches[i] for i in permuted(np.arange(len(batches)), len(batches), key_data)]

    def _indices(self, epoch: int, first: int, count: int) -> Indices:
        """Return part of the order of an epoch, which starts again at its end."""
        positions = np.arange(first, first + count) % self.num_samples
        if not self.shuffle:
            return positions
        return permuted(positions, self.num_samples, rng_streams.stream(self.seed, epoch, rng_streams.ORDER))

    def requests(self, epoch: int, window: int, batch: int) -> Iterator[BatchRequest]:
        """Yield the batches of an epoch from a position on: that of `batch` in `window`."""
        if self.batch_sampler.keeps_order:
            # Each window is one batch; after it, the next window starts.
            window, batch = window + (batch > 0), 0
            for indices in self._batches_in_order(epoch, window):
                window += 1
                yield BatchRequest(epoch, indices, {"window": window, "batch": 0})
        for number in range(window, self.num_windows):
            batches = self.window(epoch, number)
            for k in range(batch, len(batches)):
                is_last = k + 1 == len(batches)
                position = {"window": number + 1, "batch": 0} if is_last else {"window": number, "batch": k + 1}
                yield BatchRequest(epoch, _to_list(batches[k]), position)
            batch = 0

    def _batches_in_order(self, epoch: int, window: int) -> Iterator[list[int]]:
        """Yield the batches of the full windows, one per window; the order of many windows is computed at once."""
        sampler = self.batch_sampler
        size, num_full = sampler.window_size, self.num_used // sampler.window_size
        step = max(BLOCK // size, 1)
        for start in range(window, num_full, step):
            count = min(step, num_full - start) * size
            indices = _to_list(self._indices(epoch, start * size, count))
            for first in range(0, count, size):
                yield from sampler.divide(indices[first : first + size])


def _to_list(indices: Indices) -> list[int]:
    """Return indices as Python's integers, which index any dataset."""
    return list(memoryview(indices))  # type: ignore[arg-type]
