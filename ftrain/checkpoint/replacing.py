"""Write the checkpoint of a step where one may exist already: damaged, identical or different."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path

from ftrain.checkpoint import files
from ftrain.checkpoint.manifest import Manifest, dump
from ftrain.checkpoint.reading import verify
from ftrain.checkpoint.saving import temporary_path
from ftrain.errors import CheckpointError, UnreachableError

NEW = ".new"
"""Suffix of a complete checkpoint that is about to replace another."""


def current_path(path: Path) -> Path:
    """Return the directory of a checkpoint: `path`, or that with `NEW` which an interrupted replacement has left."""
    new = _replacement_path(path)
    return new if files.exists(new) and not files.exists(path) else path


def write_or_replace(path: Path, step: int, write: Callable[[Path], Manifest]) -> Manifest:
    """Write the checkpoint of a step with `write`, which also verifies it, and return its manifest.

    An existing one that is damaged or of another step is renamed. One of the same run is replaced, unless its content
    is the same; at each moment the old or the new one exists. Raises a CheckpointError when one of another run with
    different content exists.
    """
    finish_replacement(path, step)
    existing = _intact_manifest(path, step)
    if existing is None:
        if files.exists(path):
            files.rename(path, path.parent / f"damaged-{path.name}-{uuid.uuid4().hex}")
        return write(path)
    new = _replacement_path(path)
    written = write(new)
    if _content(written) != _content(existing) and written.run == existing.run:
        finish_replacement(path, step)
        return written
    # The old one stays. A failed save may not have synced its name, but writing the new one has synced the directory.
    discard(new)
    if _content(written) != _content(existing):
        raise CheckpointError(
            f"Checkpoints.save: {path} is of another run, {existing.run}, and differs from what is to be saved; resume "
            "from it (latest() loads it), or use another directory"
        )
    return existing


def finish_replacement(path: Path, step: int) -> None:
    """Replace a checkpoint by the one with `NEW` next to it, if there is one and it is intact."""
    new = _replacement_path(path)
    if not files.exists(new):
        return
    trash = None
    if files.exists(path):
        if _intact_manifest(new, step) is None:
            discard(new)
            return
        trash = temporary_path(path)
        files.rename(path, trash)
    files.rename(new, path)
    # Before the old one is removed: else, after a power failure, it could have its name again without all of its files.
    files.sync_directory(path.parent)
    if trash is not None:
        files.remove(trash)


def discard(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that no part of it is ever read as a checkpoint."""
    trash = temporary_path(path)
    files.rename(path, trash)
    files.remove(trash)


def _replacement_path(path: Path) -> Path:
    return path.with_name(f"{path.name}{NEW}")


def _intact_manifest(path: Path, step: int) -> Manifest | None:
    """Return the manifest of a checkpoint if it is intact and of this step, else None.

    Raises an UnreachableError if the checkpoint cannot be read and may be intact.
    """
    try:
        manifest = verify(path)
    except UnreachableError:
        raise
    except CheckpointError:
        return None
    return manifest if manifest.step == step else None


def _content(manifest: Manifest) -> bytes:
    """Return a manifest as bytes without its run and environment, to compare what two checkpoints hold."""
    return dump(dataclasses.replace(manifest, run="", environment={}))
