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
from ftrain.data.fetched_batch import FetchedBatch, ReadError
from ftrain.data.token_files import TokenFile
from ftrain.data.worker_messages import MAX_BYTES
from ftrain.types import PyTree

Collate: TypeAlias = Callable[[list[Any]], PyTree]
"""``list of samples -> batch``."""

_Samples: TypeAlias = "tuple[list[Any], list[ReadError]]"
"""The samples that could be read, and the errors of the others."""


class BatchDataset(Dataset[FetchedBatch]):
    """The batches of a map-style dataset, indexed by `BatchRequest`; read in this process or by workers.

    Seeding the generators takes longer than reading a small sample. So if the dataset has no attribute ``draws``,
    samples are read without seeding until one draws random numbers. Its batch is then read again with seeding, as are
    all later ones in this process.

    Args:
        dataset: the map-style dataset of samples.
        collate: makes a batch of a list of samples.
        seed: seed of the random numbers that samples draw.
        skip_errors: leave out samples that raise.
        refill: repeat good samples of the batch in the place of those left out, so that the batch keeps its size.
    """

    def __init__(self, dataset: Any, collate: Collate, *, seed: int, skip_errors: bool, refill: bool) -> None:
        self._dataset, self._seed = dataset, seed
        self._collate = _default_collate if collate is default_collate else collate
        self._skip_errors, self._refill = skip_errors, refill
        collated_rows = isinstance(dataset, ArrayDataset | TokenFile) and collate is default_collate
        self._rows = dataset.rows if collated_rows else None
        self._getitems = getattr(dataset, "__getitems__", None)
        draws = getattr(dataset, "draws", None)
        # None: not known yet.
        self._draws = None if draws is None else bool(draws)
        self._collate_draws = collate is not default_collate and getattr(collate, "draws", True)

    def __getitem__(self, request: BatchRequest) -> FetchedBatch:
        if self._rows is not None:
            return self._fetch_rows(self._rows, request)
        if self._draws is False and not self._collate_draws:
            return self._fetch(request, *self._read(request, request.indices, seeded=False))
        with rng_streams.PreservedState(detect=self._draws is None) as preserved:
            return self._fetch(request, *self._read_seeding_if_needed(request, preserved))

    def _fetch_rows(self, rows: Callable[[list[int]], PyTree], request: BatchRequest) -> FetchedBatch:
        try:
            return FetchedBatch(request.position, rows(request.indices))
        except Exception as error:
            read_error = ReadError.from_exception(f"{describe(request)} cannot be read", error)
            return FetchedBatch(request.position, error=read_error)

    def _fetch(self, request: BatchRequest, samples: list[Any], errors: list[ReadError]) -> FetchedBatch:
        position, skipped = request.position, tuple(errors)
        if errors and not self._skip_errors:
            return FetchedBatch(position, error=errors[0])
        if errors and self._refill:
            if not samples:
                return FetchedBatch(position, skipped=skipped, empty=True)
            samples += [samples[i % len(samples)] for i in range(len(errors))]
        if self._collate_draws:
            rng_streams.seed_collation(self._seed, request.epoch, request.indices[0] if request.indices else 0)
        try:
            return FetchedBatch(position, self._collate(samples), skipped)
        except Exception as error:
            return FetchedBatch(
                position, error=ReadError.from_exception(f"{describe(request)} cannot be collated", error)
            )

    def _read_seeding_if_needed(self, request: BatchRequest, preserved: rng_streams.PreservedState) -> _Samples:
        if self._draws is None:
            samples = self._read(request, request.indices, seeded=False)
            if not preserved.has_drawn():
                return samples
            self._draws = True
        return self._read(request, request.indices, seeded=self._draws)

    def _read(self, request: BatchRequest, indices: list[int], *, seeded: bool) -> _Samples:
        if self._getitems is not None and not seeded and indices:
            # If this fails, reading them one by one finds the sample at fault.
            with suppress(Exception):
                samples = list(self._getitems(indices))
                if len(samples) == len(indices):
                    return samples, []
        dataset, samples, errors = self._dataset, [], []
        for index in indices:
            if seeded:
                rng_streams.seed_sample(self._seed, request.epoch, index)
            try:
                samples.append(dataset[index])
            except Exception as error:
                subject = f"sample {index} of epoch {request.epoch} cannot be read"
                errors.append(ReadError.from_exception(subject, error))
                if not self._skip_errors:
                    break
        return samples, errors


def _default_collate(samples: list[Any]) -> PyTree:
    """Return `default_collate` of samples; if they are dicts of tensors, without its search through types."""
    first = samples[0]
    if type(first) is not dict:
        return default_collate(samples)
    # Workers stack what they do not send by value in shared memory.
    most_bytes = MAX_BYTES / len(samples) if get_worker_info() else math.inf
    for value in first.values():
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_nested:
            return default_collate(samples)
        if value.nbytes > most_bytes:
            return default_collate(samples)
    return {key: torch.stack([sample[key] for sample in samples]) for key in first}


def describe(request: BatchRequest, max_listed: int = 8) -> str:
    """Return a text for messages that names the samples of a batch."""
    listed = ", ".join(map(str, request.indices[:max_listed]))
    more = f" and {len(request.indices) - max_listed} more" if len(request.indices) > max_listed else ""
    return f"the batch of samples {listed}{more} of epoch {request.epoch}"
