"""The result of reading a batch: the batch, or the errors of its samples."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import get_worker_info

from ftrain.types import PyTree

Position: TypeAlias = dict[str, Any]
"""A position within an epoch: integers and, for an iterable dataset, the state that the dataset itself returned."""


COLLATE_REMEDY = "pass a function as collate=, such as ft.data.pad() for tensors of different lengths"
"""What to do when samples cannot be collated."""
NO_SHARED_MEMORY = "unable to allocate shared memory(shm)"
"""A part of torch's error when the file system that holds the large tensors of workers is full."""
MEMORY_REMEDY = (
    "make /dev/shm larger, which a container limits (docker run --shm-size=8g), or pass a smaller num_workers="
)
"""What to do then."""


class ReadError(NamedTuple):
    """An error raised while samples were read or collated, in a form that can be sent between processes."""

    subject: str
    """The sample or batch, and what failed."""
    message: str
    """The class and message of the error."""
    trace: str
    cause: Exception | None
    """The error itself; None when it was raised in a worker."""
    remedy: str
    """What to do."""

    @classmethod
    def from_exception(cls, subject: str, error: Exception, remedy: str = "repair it") -> ReadError:
        """Return the description of an error that is being handled."""
        trace = "".join(traceback.format_exception(error))
        cause = None if get_worker_info() else error
        if NO_SHARED_MEMORY in str(error):
            remedy = MEMORY_REMEDY
        return cls(subject, f"{type(error).__name__}: {error}", trace, cause, remedy)


class FetchedBatch(NamedTuple):
    """A batch, or the reason why there is none; and the position in the epoch after it."""

    position: Position
    batch: PyTree = None
    skipped: tuple[ReadError, ...] = ()
    """The errors of samples that were left out."""
    error: ReadError | None = None
    """The error because of which there is no batch."""
    empty: bool = False
    """Whether there is no batch because all its samples were left out."""
