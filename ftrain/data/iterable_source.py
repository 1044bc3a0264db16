"""An iterable dataset as the source of a `Loader`: it has its own order, and may save its own position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from operator import index
from typing import Any

from torch.utils.data import IterableDataset

from ftrain import random
from ftrain.data import rng_streams
from ftrain.data.batch_dataset import Collate
from ftrain.data.fetched_batch import FetchedBatch, Position, collate_remedy, read_error
from ftrain.data.stateful import has_position, position, seek
from ftrain.data.worker_pool import WorkerOptions, read_in_one_worker
from ftrain.errors import DataError, warn

START: Position = {"batch": 0, "ended": 0}
"""The start of an epoch. ``ended`` is 1 after the dataset has raised StopIteration: its own position, in ``source``,
may then be the start of the next epoch, and not a position in this one."""

END = object()
"""Stands for the sample after the last one."""


@dataclass(eq=False)
class IterableBatchDataset(IterableDataset[FetchedBatch]):
    """The batches of one epoch of an iterable dataset, from a position on; read in this process or by a worker."""

    dataset: Any
    batch_size: int
    collate: Collate
    seed: int
    drop_last: bool
    epoch: int = 0
    position: Position | None = None
    first_source: Mapping[str, Any] | None = None
    """The position of the dataset itself before its first epoch; None if it has none."""

    def __iter__(self) -> Iterator[FetchedBatch]:
        start = self.position or START
        if start["ended"]:
            return
        try:
            with rng_streams.PreservedState():
                samples, stateful = self._open(start)
                batch = self._fetch(samples, stateful, start["batch"])
                starts_after_an_epoch = not start["batch"] and "source" in start
                if batch is None and starts_after_an_epoch and self.first_source is not None:
                    # The position of this dataset after an epoch is its end, and not the start of the next epoch.
                    samples, stateful = self._open({**START, "source": self.first_source})
                    batch = self._fetch(samples, stateful, 0)
        except Exception as error:
            remedy = "repair it, or pass the dataset of the run that is resumed"
            yield _failed(f"the stream of epoch {self.epoch} cannot be opened", error, remedy)
            return
        for number in count(start["batch"] + 1):
            if batch is None:
                break
            yield batch
            with rng_streams.PreservedState():
                batch = self._fetch(samples, stateful, number)
        if stateful is self.dataset:
            # The next epoch starts here, perhaps in another process.
            yield FetchedBatch({"batch": number - 1, "ended": 1, "source": position(stateful)}, empty=True)

    def _open(self, start: Position) -> tuple[Iterator[Any], Any]:
        """Return the samples from a position on, and the object that has a position: dataset, iterator or None."""
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(self.epoch)
        saved = start.get("source")
        dataset_has_position = has_position(self.dataset)
        if dataset_has_position and saved is not None:
            seek(self.dataset, saved)
        samples = iter(self.dataset)
        if saved is None:
            # Without a saved position, the earlier samples are read again.
            num_read = start["batch"] * self.batch_size
            for ordinal in range(num_read):
                self._seed(ordinal)
                if next(samples, END) is END:
                    raise DataError(f"it ended after {ordinal} samples, and {num_read} were read before")
        elif not dataset_has_position:
            seek(samples, saved)
        if dataset_has_position:
            return samples, self.dataset
        return samples, samples if has_position(samples) else None

    def _seed(self, ordinal: int) -> None:
        """Seed the global generators for a sample, unless the dataset says that it draws no random numbers.

        `BatchDataset` seeds only when a sample has drawn, but it reads that sample again, which a stream cannot do.
        """
        if getattr(self.dataset, "draws", True):
            rng_streams.seed_sample(self.seed, self.epoch, ordinal)

    def _fetch(self, samples: Iterator[Any], stateful: Any, number: int) -> FetchedBatch | None:
        """Return the batch with this number in the epoch, or its error; None if no batch is left."""
        batch: list[Any] = []
        ended = 0
        first = number * self.batch_size
        for ordinal in range(first, first + self.batch_size):
            self._seed(ordinal)
            try:
                batch.append(next(samples))
            except StopIteration:
                ended = 1
                break
            except Exception as error:
                return _failed(f"sample {ordinal} of the stream, epoch {self.epoch}", error)
        if not batch or (self.drop_last and len(batch) < self.batch_size):
            return None
        after: Position = {"batch": number + 1, "ended": ended}
        if stateful is not None:
            after["source"] = position(stateful)
        rng_streams.seed_collation(self.seed, self.epoch, first)
        try:
            return FetchedBatch(after, self.collate(batch))
        except Exception as error:
            last = first + len(batch) - 1
            subject = f"samples {first} to {last} of the stream, epoch {self.epoch}, cannot be collated"
            return _failed(subject, error, collate_remedy(self.collate))


def _failed(subject: str, error: Exception, remedy: str = "repair it") -> FetchedBatch:
    return FetchedBatch({}, error=read_error(subject, error, remedy))


class IterableSource:
    """The epochs of an iterable dataset, read in this process or in one worker; has the attributes of `MapSource`."""

    def __init__(self, stream: IterableBatchDataset, options: WorkerOptions) -> None:
        self._stream, self._options = replace(stream, first_source=position(stream.dataset)), options
        self._epoch_start, self._unfinished, self._finished = self._stream.first_source, False, False
        self._start_reached: Position | None = None
        """The start of the next epoch, if the dataset of this process is already there after it finished an epoch."""
        self.start = START
        self.num_windows: int | None = None
        self.num_dropped = 0
        self.optional_keys: tuple[str, ...] = ("source",)
        self.fingerprint = {
            "seed": index(stream.seed),
            "batch_size": index(stream.batch_size),
            "drop_last": bool(stream.drop_last),
        }

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if the dataset has no length."""
        if not hasattr(self._stream.dataset, "__len__"):
            return None
        length, size = len(self._stream.dataset), self._stream.batch_size
        return length // size if self._stream.drop_last else -(-length // size)

    def for_state(self, state: Mapping[str, Any]) -> IterableSource:
        """Return this source, which fits every saved state: a `MapSource` is adapted to it."""
        return self

    def next_start(self, end: Position) -> Position:
        """Return the position at which the epoch after one that has just ended starts."""
        if "source" not in end or not has_position(self._stream.dataset):
            return START
        start = {**START, "source": end["source"]}
        self._start_reached = start if self._finished else None
        return start

    def batches(self, epoch: int, position: Position) -> Iterator[FetchedBatch]:
        """Yield the batches of an epoch that follow a position."""
        if position["batch"] and "source" not in position and not position["ended"]:
            reason = "had no position when this one was saved"
            if not has_position(self._stream.dataset):
                reason = "has neither state_dict nor get_state"
            warn(
                f"loader: {type(self._stream.dataset).__name__} {reason}, so "
                f"{position['batch'] * self._stream.batch_size} samples are read again and thrown away to resume"
            )
        stream = replace(self._stream, epoch=epoch, position=position)
        if self._options.num_workers:
            seed = random.seed_of(rng_streams.stream(stream.seed, epoch, rng_streams.SAMPLE))
            yield from read_in_one_worker(stream, seed, self._options)
            return
        if "source" not in position and has_position(stream.dataset):
            self._rewind()
        elif position is self._start_reached:
            # The dataset is there already. To set its position could start the epoch that it has finished again.
            stream = replace(stream, position=START)
        self._start_reached = None
        self._unfinished, self._finished = True, False
        yield from stream
        self._unfinished, self._finished = False, not position["ended"]

    def _rewind(self) -> None:
        """After an unfinished epoch, set the dataset back to the position at which that epoch started."""
        if self._unfinished and self._epoch_start is not None:
            seek(self._stream.dataset, self._epoch_start)
        self._epoch_start = position(self._stream.dataset)
