"""The result of reading a batch: the batch, or the errors of its samples."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import default_collate, get_worker_info

from ftrain.errors import DataError
from ftrain.types import PyTree

Position: TypeAlias = dict[str, Any]
"""A position within an epoch: integers and, for an iterable dataset, the state that the dataset itself returned."""

NO_SHARED_MEMORY = "unable to allocate shared memory(shm)"
"""A part of torch's error when the file system that holds the large tensors of workers is full."""
MEMORY_REMEDY = (
    "make /dev/shm larger, which a container limits (docker run --shm-size=8g), or pass a smaller num_workers="
)


class FetchedBatch(NamedTuple):
    """A batch, or the reason why there is none; and the position in the epoch after it."""

    position: Position
    batch: PyTree = None
    skipped: tuple[DataError, ...] = ()
    """The errors of samples that were left out."""
    error: DataError | None = None
    """The error if there is no batch because of one."""
    empty: bool = False
    """Whether there is no batch because all its samples were left out."""


def collate_remedy(collate: Any) -> str:
    """Return a text for messages: what to do about an error of a collate function."""
    if collate is default_collate:
        return "pass a function as collate=, such as ft.data.pad() for tensors of different lengths"
    return "repair the samples, or pass another function as collate="


def read_error(subject: str, error: Exception, remedy: str = "repair it") -> DataError:
    """Return the DataError that the loader raises for an error of the data; a worker can send it."""
    if NO_SHARED_MEMORY in str(error):
        remedy = MEMORY_REMEDY
    failure = DataError(f"loader: {subject}: {type(error).__name__}: {error}; {remedy}")
    failure.__cause__ = error
    if get_worker_info():
        # The traceback goes into a note, because pickling leaves out the cause.
        failure.add_note(f"In a worker:\n{''.join(traceback.format_exception(error))}")
    return failure
