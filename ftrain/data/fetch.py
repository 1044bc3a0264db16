"""Make one batch: read its samples, each with random numbers of its own, and put them together."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, default_collate, get_worker_info

from ftrain.data import draws
from ftrain.data.arrays import Arrays
from ftrain.data.plan import Request
from ftrain.errors import DataError
from ftrain.types import PyTree

Collate = Callable[[list[Any]], PyTree]
"""A list of samples -> a batch."""

Place = dict[str, Any]
"""Where a pass stands: whole numbers, and what a stream says of itself."""


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
        self._draws = getattr(dataset, "draws", True)
        self._rows = dataset.rows if isinstance(dataset, Arrays) and collate is default_collate else None

    def __getitem__(self, request: Request) -> Fetched:
        after = dict(zip(("window", "batch"), request.after, strict=True))
        if self._rows is not None:
            return Fetched(after, self._rows(request.indices))
        with draws.preserved():
            samples, bad = self._samples(request)
            if bad and not self._skip:
                return Fetched(after, failure=bad[0])
            if bad and self._refill:
                if not samples:
                    return Fetched(after, skipped=tuple(bad), empty=True)
                samples += [samples[i % len(samples)] for i in range(len(bad))]
            return self._collated(request, samples, Fetched(after, skipped=tuple(bad)))

    def _samples(self, request: Request) -> tuple[list[Any], list[Failure]]:
        samples, bad = [], []
        for index in request.indices:
            if self._draws:
                draws.seed_sample(self._seed, request.epoch, index)
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                bad.append(Failure.of(f"sample {index} of epoch {request.epoch} cannot be read", error))
                if not self._skip:
                    break
        return samples, bad

    def _collated(self, request: Request, samples: list[Any], made: Fetched) -> Fetched:
        draws.seed_collation(self._seed, request.epoch, request.indices[0] if request.indices else 0)
        try:
            return Fetched(made.after, self._collate(samples), made.skipped)
        except Exception as error:
            return Fetched(made.after, failure=Failure.of(f"{named(request)} cannot be collated", error))


def named(request: Request, most: int = 8) -> str:
    """Name the samples of a batch for a message."""
    more = f" and {len(request.indices) - most} more" if len(request.indices) > most else ""
    return f"the batch of samples {', '.join(map(str, request.indices[:most]))}{more} of epoch {request.epoch}"
