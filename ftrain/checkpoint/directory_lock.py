"""The lock of the directory of a run, in which only one process writes."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ftrain.checkpoint import files
from ftrain.checkpoint.manifest import NAME as MANIFEST
from ftrain.errors import CheckpointError, warn

LOCK = ".lock"
MAX_HOLDER_BYTES = 4096
"""The largest number of bytes to read from a lock file, in which its holder writes its host and process."""
PATIENCE, PAUSE = 60.0, 0.1
"""Seconds until every machine sees a new file, even if it caches a shared directory; and seconds between checks."""


def lock_directory(directory: Path) -> files.Lock:
    """Lock a directory for this process; warn if the file system has no locks.

    Raises a CheckpointError if the directory is a checkpoint, which files of a run would damage.
    """
    if files.exists(directory / MANIFEST):
        raise CheckpointError(
            f"Checkpoints: {directory} is a checkpoint, and not the directory of a run; pass the directory that it is "
            f"in, {directory.parent}, to continue that run, or another one for a new run"
        )
    held = files.lock(directory / LOCK, _this_process())
    if not held.excludes:
        warn(
            f"Checkpoints: the file system of {directory} has no locks, so nothing keeps another process from writing "
            "there; make sure that none does"
        )
    return held


def _this_process() -> dict[str, object]:
    return {"host": socket.gethostname(), "process": os.getpid()}


def published(held: files.Lock) -> str:
    """Return the text of a lock file of this process, after a sync, so that other machines can read it too."""
    files.sync(held.descriptor)
    return _holder(held.path)


def require_locked_by(directory: Path, expected: str) -> None:
    """Check that the lock file in the directory of this rank has the `published` text of the first rank.

    Raises a CheckpointError if it does not have it after `PATIENCE` seconds.
    """
    waited = 0.0
    while True:
        with suppress(FileNotFoundError):
            if _holder(directory / LOCK) == expected:
                return
        if waited > PATIENCE:
            raise CheckpointError(
                f"Checkpoints: {directory} on this rank is not the directory that the first rank has opened. All ranks "
                "write and read each checkpoint: use a directory on a file system that they share; its path may differ"
            )
        threading.Event().wait(PAUSE)
        waited += PAUSE


def _holder(path: Path) -> str:
    """Return the text of a lock file, which says which process holds the lock."""
    return files.read(path, MAX_HOLDER_BYTES).decode(errors="replace")


def require_held(held: files.Lock) -> None:
    """Check that this process itself still holds a lock. Raises a CheckpointError if not, also in a forked process."""
    directory = held.path.parent
    with system_errors(directory):
        if files.is_held(held):
            return
    if held.process != os.getpid():
        reason = f"it is open for writing in process {held.process}, from which this one was forked; open it again here"
    elif not files.exists(directory):
        reason = "it was renamed or removed while this process wrote to it, and nothing more can be saved there"
    else:
        reason = (
            f"its {LOCK} was removed or replaced while this process wrote to it, so that another process may write "
            "there now; do not remove that file, and resume from the newest checkpoint"
        )
    raise CheckpointError(f"Checkpoints.save: {directory}: {reason}")


@contextmanager
def system_errors(directory: Path) -> Iterator[None]:
    """Context for calls of the file system.

    Raises a CheckpointError that names the directory in place of an error of the system.
    """
    try:
        yield
    except BlockingIOError as error:
        # `files.lock` raises it with the text of the lock file.
        if str(error) == json.dumps(_this_process()):
            holder, remedy = f"another run in this process, {error}", "give each run one of its own"
        else:
            holder, remedy = str(error), "use another directory, or stop that process"
        raise CheckpointError(f"Checkpoints: {directory} is being written to by {holder}; {remedy}") from None
    except PermissionError as error:
        raise CheckpointError(
            f"Checkpoints: {str(directory)!a} cannot be used: {error}. The user of this process may not read or write "
            "there: give it the permission, or use another directory"
        ) from error
    except (OSError, UnicodeError) as error:  # The file system may have no characters for a path.
        raise CheckpointError(f"Checkpoints: {str(directory)!a} cannot be used: {error}") from error
