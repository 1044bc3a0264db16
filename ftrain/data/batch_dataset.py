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
"""``list of samples -> batch``."""

MAX_LISTED = 8
"""The largest number of samples that a message names."""

READ_REMEDY = 'repair it, or pass on_error="skip" to go on without such samples'


class BatchDataset(Dataset[FetchedBatch]):
    """The batches of a map-style dataset, indexed by `BatchRequest`; read in this process or by workers.

    Seeding takes longer than reading a small sample. So if the dataset has no attribute ``draws``, samples are read
    without it until one draws. Its batch is then read again with seeding, as are all later ones in this process.

    With `skip_errors`, samples that raise are left out; with `refill`, good ones of the batch are repeated in their
    place.
    """

    def __init__(self, dataset: Any, collate: Collate, *, seed: int, skip_errors: bool, refill: bool) -> None:
        self._dataset, self._seed = dataset, seed
        self._collate = _default_collate if collate is default_collate else collate
        self._collate_remedy = collate_remedy(collate)
        self._skip_errors, self._refill = skip_errors, refill
        collated_rows = isinstance(dataset, ArrayDataset | TokenFile) and collate is default_collate
        self._rows = dataset.rows if collated_rows else None
        self._getitems = getattr(dataset, "__getitems__", None)
        draws = getattr(dataset, "draws", None)
        # None: not known yet.
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
                together = list(self._getitems(indices))
                if len(together) == len(indices):
                    return together, []
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
    """Return `default_collate` of samples; of dicts of small tensors without its search, and its shared memory."""
    first = samples[0]
    most_bytes = MAX_BYTES / len(samples) if get_worker_info() else math.inf
    if type(first) is dict and all(
        type(value) is Tensor and value.layout is torch.strided and not value.is_nested and value.nbytes <= most_bytes
        for value in first.values()
    ):
        return {key: torch.stack([sample[key] for sample in samples]) for key in first}
    return default_collate(samples)


def _built(
    request: BatchRequest,
    action: str,
    build: Callable[[], PyTree],
    skipped: tuple[DataError, ...] = (),
    remedy: str = READ_REMEDY,
) -> FetchedBatch:
    """Return the batch that `build` returns, or its error."""
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
