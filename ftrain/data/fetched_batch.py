"""What reading a batch results in: the batch, or the errors of its samples."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import get_worker_info

from ftrain.types import PyTree

Position: TypeAlias = dict[str, Any]
"""A position within an epoch: integers and, for an iterable dataset, the state that the dataset itself returned."""


class ReadError(NamedTuple):
    """An error raised while samples were read or collated, in a form that can be sent between processes.

    Args:
        subject: the sample or batch, and what failed.
        message: the class and message of the error.
        trace: the formatted traceback.
        cause: the error itself; None when it was raised in a worker.
    """

    subject: str
    message: str
    trace: str
    cause: Exception | None

    @classmethod
    def from_exception(cls, subject: str, error: Exception) -> ReadError:
        """Describe an error that is being handled."""
        trace = "".join(traceback.format_exception(error))
        return cls(subject, f"{type(error).__name__}: {error}", trace, None if get_worker_info() else error)


class FetchedBatch(NamedTuple):
    """A batch, or why there is none.

    Args:
        position: the position in the epoch after this batch.
        batch: the collated samples.
        skipped: the errors of samples that were left out.
        error: the error because of which there is no batch.
        empty: whether there is no batch because all its samples were left out.
    """

    position: Position
    batch: PyTree = None
    skipped: tuple[ReadError, ...] = ()
    error: ReadError | None = None
    empty: bool = False
