"""The lock of the directory of a run, in which only one process writes."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftrain.checkpoint import files
from ftrain.errors import CheckpointError

LOCK = ".lock"


def lock_directory(directory: Path) -> files.Lock:
    """Lock a directory for this process; warn where the file system has no locks.

    Raises:
        BlockingIOError: when another process has locked it; the message is what that wrote.
    """
    held = files.lock(directory / LOCK, {"host": socket.gethostname(), "process": os.getpid()})
    if not held.excludes:
        warnings.warn(
            f"Checkpoints: the file system of {directory} has no locks, so nothing keeps another process from writing "
            "there; make sure that none does",
            stacklevel=6,
        )
    return held


def require_held(held: files.Lock) -> None:
    """Check that this process still holds the lock of a directory.

    Raises:
        CheckpointError: when it does not, because this is a copy of the process, or the file was removed.
    """
    directory = held.path.parent
    with system_errors(directory):
        if files.is_held(held):
            return
    if held.process != os.getpid():
        why = f"it is open for writing in process {held.process}, of which this one is a copy; open it here anew"
    elif not files.exists(directory):
        why = "it was renamed or removed while this process wrote to it, and nothing more can be saved there"
    else:
        why = (
            f"its {LOCK} was removed or replaced while this process wrote to it, so that another one may write "
            "there now; leave that file alone, and go on from the newest checkpoint"
        )
    raise CheckpointError(f"Checkpoints.save: {directory}: {why}")


@contextmanager
def system_errors(directory: Path) -> Iterator[None]:
    """Context that names a directory in errors of the system.

    Raises:
        CheckpointError: in place of an OSError; of a BlockingIOError it says who writes to the directory.
    """
    try:
        yield
    except BlockingIOError as error:
        raise CheckpointError(
            f"Checkpoints: {directory} is being written to by {error}; use another directory, or stop that one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"Checkpoints: {directory} cannot be used: {error}") from error
