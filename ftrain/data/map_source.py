"""A map-style dataset as the source of a `Loader`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from ftrain.data.epoch_plan import EpochPlan
from ftrain.data.fetched_batch import FetchedBatch, Position
from ftrain.data.worker_pool import WorkerPool

LENGTHS = "lengths"
"""The option with the checksum of all lengths; absent if they are a function, which is not called for all samples."""
ORDER = 2
"""The version of the order of samples: a position that was saved with another version is refused."""


def options_of_lengths(lengths: Sequence[int] | Callable[[int], int] | None, window_size: int) -> dict[str, int]:
    """Return the options of a loader that depend on the lengths of samples; {} without lengths."""
    if lengths is None:
        return {}
    checksum = {} if callable(lengths) else {LENGTHS: zlib.crc32(np.asarray(lengths).astype("<i8").tobytes())}
    return {"window_size": index(window_size), **checksum}


class MapSource:
    """The batches of a map-style dataset, as an `EpochPlan` divides it and a `WorkerPool` reads it."""

    def __init__(self, plan: EpochPlan, workers: WorkerPool, options: dict[str, Any]) -> None:
        self.start: Position = {"window": 0, "batch": 0}
        """The position at which an epoch starts; its keys are in every position."""
        self.optional_keys: tuple[str, ...] = ()
        """Further keys that a position may have."""
        self.fingerprint = {**options, "order": ORDER}
        """The options on which the order of batches depends. A saved position is valid only for equal ones."""
        self.num_batches = plan.num_batches
        """The number of batches in an epoch; None if it depends on the lengths of samples."""
        self.num_windows: int | None = plan.num_windows
        """The largest ``window`` of a position; None if positions have none."""
        self.num_dropped = plan.num_samples - plan.num_used
        """The number of samples that an epoch leaves out, since they do not fill a batch."""
        self._plan, self._workers, self._options = plan, workers, options

    def for_state(self, state: Mapping[str, Any]) -> MapSource:
        """Return a source to compare with a saved state: the lengths count only if both have their checksum."""
        source = MapSource(self._plan, self._workers, self._options)
        if LENGTHS not in state:
            source.fingerprint.pop(LENGTHS, None)
        elif "window_size" in source.fingerprint:
            # Lengths of a function are taken to be the same. The states that are saved from now on keep the checksum.
            source.fingerprint.setdefault(LENGTHS, state[LENGTHS])
        return source

    def next_start(self, end: Position) -> Position:
        """Return the position at which the epoch after one that has ended starts."""
        return self.start

    def batches(self, epoch: int, position: Position) -> Iterator[FetchedBatch]:
        """Yield the batches of an epoch that follow a position."""
        return self._workers(self._plan.requests(epoch, position["window"], position["batch"]))
