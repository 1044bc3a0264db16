"""Make one batch: read its samples, each with random numbers of its own, and put them together."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils.data import Dataset, default_collate, get_worker_info

from ftrain.data import rng_streams
from ftrain.data.arrays import Arrays
from ftrain.data.epoch_plan import Request
from ftrain.data.tokens import TokenFile
from ftrain.errors import DataError
from ftrain.types import PyTree

Collate = Callable[[list[Any]], PyTree]
"""A list of samples -> a batch."""

Place = dict[str, Any]
"""Where a pass stands: whole numbers, and what a stream says of itself."""


Read: TypeAlias = "tuple[list[Any], list[Failure]]"
"""The good samples, and what went wrong with the others."""


@dataclass(frozen=True)
class Failure:
    """What went wrong with a sample, in a form that a worker can send.

    Args:
        what: the sample, or samples.
        error: the kind and message of the error.
        trace: where it came from.
        cause: the error itself, if it was raised in this process.
    """

    what: str
    error: str
    trace: str
    cause: Exception | None

    @classmethod
    def of(cls, what: str, error: Exception) -> Failure:
        """Describe an error that is being handled."""
        trace = "".join(traceback.format_exception(error))
        return cls(what, f"{type(error).__name__}: {error}", trace, None if get_worker_info() else error)

    def to_error(self, hint: str) -> DataError:
        """Return the error to raise, with its cause, or with a note of where a worker met it."""
        found = DataError(f"loader: {self.what}: {self.error}{hint}")
        if self.cause is None:
            found.add_note(f"In a worker:\n{self.trace}")
        found.__cause__ = self.cause
        return found


@dataclass(frozen=True)
class Fetched:
    """A batch, or why there is none.

    Args:
        after: where the pass stands when it has been yielded.
        batch: the batch.
        skipped: what went wrong with samples that were left out.
        failure: what went wrong with the batch.
        empty: whether no sample of the batch was any good.
    """

    after: Place
    batch: PyTree = None
    skipped: tuple[Failure, ...] = ()
    failure: Failure | None = None
    empty: bool = False


class Batches(Dataset[Fetched]):
    """The batches of a map-style dataset, by request; what a worker works with.

    To seed the generators takes longer than to read a small sample. So samples are read without it, and if one turns
    out to have drawn, they are read again with it, as are all later ones in this process.

    Args:
        dataset: of samples.
        collate: puts samples together.
        seed: of what samples draw.
        skip: whether samples that raise are left out.
        refill: whether good samples of the batch take their places, so that it keeps its shape.
    """

    def __init__(self, dataset: Any, collate: Collate, *, seed: int, skip: bool, refill: bool) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._skip, self._refill = skip, refill
        self._rows = dataset.rows if isinstance(dataset, Arrays | TokenFile) and collate is default_collate else None
        self._together = getattr(dataset, "__getitems__", None)
        draws_itself = getattr(dataset, "draws", None)
        self._watched, self._seeded, self._begun = draws_itself is None, bool(draws_itself), False
        self._collation_draws = collate is not default_collate and getattr(collate, "draws", True)

    def __getitem__(self, request: Request) -> Fetched:
        after = dict(zip(("window", "batch"), request.after, strict=True))
        if self._rows is not None:
            try:
                return Fetched(after, self._rows(request.indices))
            except Exception as error:
                return Fetched(after, failure=Failure.of(f"{named(request)} cannot be read", error))
        drawing = self._watched or self._seeded or self._collation_draws
        with rng_streams.preserved() if drawing else nullcontext() as state:
            watch = rng_streams.Watch(state) if state is not None and self._watched and not self._seeded else None
            samples, bad = self._samples(request, watch)
            if bad and not self._skip:
                return Fetched(after, failure=bad[0])
            if bad and self._refill:
                if not samples:
                    return Fetched(after, skipped=tuple(bad), empty=True)
                samples += [samples[i % len(samples)] for i in range(len(bad))]
            return self._collated(request, samples, Fetched(after, skipped=tuple(bad)))

    def _samples(self, request: Request, watch: rng_streams.Watch | None) -> Read:
        if watch is not None:
            read = self._watching(request, watch)
            if read is not None:
                return read
            self._seeded = True
        return self._read(request, request.indices, seeded=self._seeded)

    def _watching(self, request: Request, watch: rng_streams.Watch) -> Read | None:
        """Read a batch, unless a sample draws; the first sample of all by itself, for most that draw always do."""
        samples, bad = [], []
        parts = [request.indices] if self._begun else [request.indices[:1], request.indices[1:]]
        self._begun = True
        for part in parts:
            more, worse = self._read(request, part, seeded=False)
            if watch.drawn():
                return None
            samples += more
            bad += worse
            if bad and not self._skip:
                break
        return samples, bad

    def _read(self, request: Request, indices: list[int], *, seeded: bool) -> Read:
        if self._together is not None and not seeded and indices:
            # Whatever is wrong with them is found again one by one.
            with suppress(Exception):
                samples = list(self._together(indices))
                if len(samples) == len(indices):
                    return samples, []
        samples, bad = [], []
        for index in indices:
            if seeded:
                rng_streams.seed_sample(self._seed, request.epoch, index)
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                bad.append(Failure.of(f"sample {index} of epoch {request.epoch} cannot be read", error))
                if not self._skip:
                    break
        return samples, bad

    def _collated(self, request: Request, samples: list[Any], made: Fetched) -> Fetched:
        if self._collation_draws:
            rng_streams.seed_collation(self._seed, request.epoch, request.indices[0] if request.indices else 0)
        try:
            return Fetched(made.after, self._collate(samples), made.skipped)
        except Exception as error:
            return Fetched(made.after, failure=Failure.of(f"{named(request)} cannot be collated", error))


def named(request: Request, most: int = 8) -> str:
    """Name the samples of a batch for a message."""
    more = f" and {len(request.indices) - most} more" if len(request.indices) > most else ""
    return f"the batch of samples {', '.join(map(str, request.indices[:most]))}{more} of epoch {request.epoch}"
