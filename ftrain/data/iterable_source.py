"""Batches of an iterable dataset, which comes in its own order and may keep its own position."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset

from ftrain import random
from ftrain.data import rng_streams
from ftrain.data.fetch import Collate, Failure, Fetched, Place
from ftrain.data.stateful import has_position, position, seek
from ftrain.data.workers import in_one_worker

START: Place = {"batch": 0, "ended": 0}
"""Where a pass begins. When the end of the stream has been seen is noted, for datasets then go back to their beginning,
and the position that they give is no longer one in this pass."""


@dataclass(eq=False)
class Stream(IterableDataset[Fetched]):
    """One pass over the dataset in batches, from a place on; what a worker works with.

    Args:
        dataset: of samples.
        batch_size: of how many samples a batch is.
        collate: puts them together.
        seed: of what samples draw.
        drop_last: whether a last batch of fewer samples is left out.
        epoch: the pass.
        place: where it begins.
    """

    dataset: Any
    batch_size: int
    collate: Collate
    seed: int
    drop_last: bool
    epoch: int = 0
    place: Place | None = None

    def __iter__(self) -> Iterator[Fetched]:
        place = self.place or START
        start = place["batch"]
        if place["ended"]:
            if "source" in place and has_position(self.dataset):
                seek(self.dataset, place["source"])
            return
        try:
            with rng_streams.preserved():
                samples, keeper = self._opened(start)
        except Exception as error:
            failure = Failure.of(f"the stream of epoch {self.epoch} cannot be opened", error)
            yield Fetched({}, failure=failure)
            return
        for number in count(start):
            with rng_streams.preserved():
                fetched = self._batch(samples, keeper, number)
            if fetched is None:
                return
            yield fetched

    def _opened(self, start: int) -> tuple[Iterator[Any], Any]:
        """Return the samples that are left, and what keeps their position: the dataset, its iterator, or nothing."""
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(self.epoch)
        saved = (self.place or {}).get("source")
        keeps = has_position(self.dataset)
        if keeps and saved is not None:
            seek(self.dataset, saved)
        samples = iter(self.dataset)
        keeper = self.dataset if keeps else samples if has_position(samples) else None
        if saved is None:
            for ordinal in range(start * self.batch_size):
                self._seed(ordinal)
                next(samples, None)
        elif not keeps:
            seek(samples, saved)
        return samples, keeper

    def _seed(self, ordinal: int) -> None:
        # Always, unless it says that it draws nothing: what was taken from a stream cannot be read again.
        if getattr(self.dataset, "draws", True):
            rng_streams.seed_sample(self.seed, self.epoch, ordinal)

    def _batch(self, samples: Iterator[Any], keeper: Any, number: int) -> Fetched | None:
        found: list[Any] = []
        ended = 0
        first = number * self.batch_size
        for ordinal in range(first, first + self.batch_size):
            self._seed(ordinal)
            try:
                found.append(next(samples))
            except StopIteration:
                ended = 1
                break
            except Exception as error:
                return Fetched({}, failure=Failure.of(f"sample {ordinal} of the stream, epoch {self.epoch}", error))
        if not found or (self.drop_last and len(found) < self.batch_size):
            return None
        after: Place = {"batch": number + 1, "ended": ended}
        if keeper is not None:
            after["source"] = position(keeper)
        rng_streams.seed_collation(self.seed, self.epoch, first)
        try:
            return Fetched(after, self.collate(found))
        except Exception as error:
            what = f"samples {first} to {first + len(found) - 1} of the stream, epoch {self.epoch}, cannot be collated"
            return Fetched({}, failure=Failure.of(what, error))


class Streamed:
    """The passes of a stream, in this process or in one worker.

    Args:
        stream: the first pass.
        num_workers: 0 or 1.
        timeout: how long to wait for a batch, in seconds.
        ahead: how many batches the worker prepares.
        context: how its process is started.
    """

    def __init__(self, stream: Stream, num_workers: int, timeout: float, ahead: int, context: str | None) -> None:
        self._stream, self._num_workers = stream, num_workers
        self._options = timeout, ahead, context
        self._begun, self._unfinished = position(stream.dataset), False
        self.start = START
        self.optional: tuple[str, ...] = ("source",)
        self.facts = {"seed": stream.seed, "batch_size": stream.batch_size, "drop_last": stream.drop_last}

    @property
    def num_batches(self) -> int | None:
        """How many batches a pass has, if the dataset says how many samples it has."""
        if not hasattr(self._stream.dataset, "__len__"):
            return None
        length, size = len(self._stream.dataset), self._stream.batch_size
        return length // size if self._stream.drop_last else -(-length // size)

    def as_of(self, state: Mapping[str, Any]) -> Streamed:
        """Return itself: it comes in its own order."""
        return self

    def check(self, place: Place) -> str | None:
        """Say what is wrong with a place."""
        return None

    def run(self, epoch: int, place: Place) -> Iterator[Fetched]:
        """Go through the rest of a pass.

        Raises:
            DataError: when the place holds a position that the dataset cannot be set to, or the worker fails.
        """
        if place["batch"] and "source" not in place and not place["ended"]:
            warnings.warn(
                f"loader: {type(self._stream.dataset).__name__} has neither state_dict nor get_state, so "
                f"{place['batch'] * self._stream.batch_size} samples are read again and thrown away to resume",
                stacklevel=2,
            )
        stream = replace(self._stream, epoch=epoch, place=place)
        if self._num_workers:
            seed = random.seed_of(rng_streams.stream(stream.seed, epoch, rng_streams.SAMPLE))
            yield from in_one_worker(stream, seed, *self._options)
            return
        if "source" not in place and has_position(stream.dataset):
            self._rewind()
        self._unfinished = True
        yield from stream
        self._unfinished = False

    def _rewind(self) -> None:
        """Bring a dataset that keeps its own position back to where a pass began that was left unfinished."""
        if self._unfinished and self._begun is not None:
            seek(self._stream.dataset, self._begun)
        self._begun = position(self._stream.dataset)
