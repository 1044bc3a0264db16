"""A map-style dataset of whole batches: reads the samples of a batch and collates them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from ftrain.data import rng_streams
from ftrain.data.array_dataset import ArrayDataset
from ftrain.data.epoch_plan import BatchRequest
from ftrain.data.fetched_batch import FetchedBatch, collate_remedy, read_error
from ftrain.data.token_files import TokenFile
from ftrain.data.worker_messages import MAX_BYTES
from ftrain.errors import DataError
from ftrain.types import PyTree

Collate: TypeAlias = Callable[[list[Any]], PyTree]
"""A function that makes a batch of a list of samples."""

MAX_LISTED = 8
"""The largest number of samples that a message names."""

READ_REMEDY = 'repair it, or pass on_error="skip" to go on without such samples'


class BatchDataset(Dataset[FetchedBatch]):
    """The batches of a map-style dataset, indexed by `BatchRequest`; read in this process or by workers.

    Seeding takes longer than reading a small sample. So if the dataset has no attribute ``draws``, samples are read
    without seeding until one draws a random number. Its batch is then read again with seeding, and all later batches
    of this process are seeded too.

    With `skip_errors`, samples that raise an error are left out; with `refill`, good samples of the batch are repeated
    in their place.
    """

    def __init__(self, dataset: Any, collate: Collate, *, seed: int, skip_errors: bool, refill: bool) -> None:
        self._dataset, self._seed = dataset, seed
        self._collate = _default_collate if collate is default_collate else collate
        self._collate_remedy = collate_remedy(collate)
        self._skip_errors, self._refill = skip_errors, refill
        # These datasets make a whole batch faster than sample by sample, and it is the same as with `default_collate`.
        has_rows = isinstance(dataset, ArrayDataset | TokenFile) and collate is default_collate
        self._rows = dataset.rows if has_rows else None
        self._getitems = getattr(dataset, "__getitems__", None)
        draws = getattr(dataset, "draws", None)
        # Whether samples draw random numbers; None until that is known.
        self._draws = None if draws is None else bool(draws)
        self._collate_draws = collate is not default_collate and getattr(collate, "draws", True)

    def __getitem__(self, request: BatchRequest) -> FetchedBatch:
        rows = self._rows
        if rows is not None:
            return _built(request, "read", lambda: rows(request.indices))
        if self._draws is False and not self._collate_draws:
            return self._fetch(request, *self._read(request, seeded=False))
        with rng_streams.PreservedState(detect=self._draws is None) as preserved:
            samples, errors = self._read(request, seeded=bool(self._draws))
            if self._draws is None and preserved.has_drawn():
                self._draws = True
                samples, errors = self._read(request, seeded=True)
            return self._fetch(request, samples, errors)

    def _read(self, request: BatchRequest, *, seeded: bool) -> tuple[list[Any], list[DataError]]:
        """Return the samples that could be read, and the errors of the others."""
        dataset, indices = self._dataset, request.indices
        if self._getitems is not None and not seeded and indices:
            # If this fails, reading them one by one finds the sample at fault.
            with suppress(Exception):
                batch = list(self._getitems(indices))
                if len(batch) == len(indices):
                    return batch, []
        samples, errors = [], []
        for index in indices:
            if seeded:
                rng_streams.seed_sample(self._seed, request.epoch, index)
            try:
                samples.append(dataset[index])
            except Exception as error:
                remedy = "it is left out" if self._skip_errors else READ_REMEDY
                errors.append(read_error(f"sample {index} of epoch {request.epoch} cannot be read", error, remedy))
                if not self._skip_errors:
                    break
        return samples, errors

    def _fetch(self, request: BatchRequest, samples: list[Any], errors: list[DataError]) -> FetchedBatch:
        """Return the batch of some samples, after `errors` were handled as the options say."""
        position, skipped = request.position, tuple(errors)
        if errors and not self._skip_errors:
            return FetchedBatch(position, error=errors[0])
        if errors and self._refill:
            if not samples:
                return FetchedBatch(position, skipped=skipped, empty=True)
            samples += [samples[i % len(samples)] for i in range(len(errors))]
        if self._collate_draws:
            rng_streams.seed_collation(self._seed, request.epoch, request.indices[0] if request.indices else 0)
        return _built(request, "collated", lambda: self._collate(samples), skipped, self._collate_remedy)


def _default_collate(samples: list[Any]) -> PyTree:
    """Return the batch that `default_collate` makes of samples; for dicts of small tensors in a faster way.

    `default_collate` looks at the type of every value. In a worker it also makes each tensor in shared memory, which
    `worker_messages` does not need for small ones.
    """
    first = samples[0]
    max_bytes = MAX_BYTES / len(samples) if get_worker_info() else math.inf

    def is_small_tensor(value: Any) -> bool:
        is_dense = type(value) is Tensor and value.layout is torch.strided and not value.is_nested
        return is_dense and value.nbytes <= max_bytes

    if type(first) is dict and all(map(is_small_tensor, first.values())):
        return {key: torch.stack([sample[key] for sample in samples]) for key in first}
    return default_collate(samples)


def _built(
    request: BatchRequest,
    action: str,
    build: Callable[[], PyTree],
    skipped: tuple[DataError, ...] = (),
    remedy: str = READ_REMEDY,
) -> FetchedBatch:
    """Return the batch that `build` returns, or the error that it raises; `action` is its verb in the error."""
    try:
        return FetchedBatch(request.position, build(), skipped)
    except Exception as error:
        failure = read_error(f"{describe(request)} cannot be {action}", error, remedy)
        return FetchedBatch(request.position, error=failure)


def describe(request: BatchRequest) -> str:
    """Return a text for messages that names the samples of a batch."""
    listed = ", ".join(map(str, request.indices[:MAX_LISTED]))
    more = f" and {len(request.indices) - MAX_LISTED} more" if len(request.indices) > MAX_LISTED else ""
    return f"the batch of samples {listed}{more} of epoch {request.epoch}"
