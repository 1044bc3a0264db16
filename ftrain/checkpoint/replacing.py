"""The checkpoint of a step, put where there may be one of that step already: a damaged one, the same, or another."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

from ftrain.checkpoint import files
from ftrain.checkpoint.manifest import Manifest, dump
from ftrain.checkpoint.reading import verify
from ftrain.checkpoint.saving import Notes, write
from ftrain.checkpoint.treedef import Described
from ftrain.errors import CheckpointError

NEW = ".new"
"""Ends the name of a checkpoint that is whole, and takes the place of another."""


def current(path: Path) -> Path:
    """Return where the checkpoint of this name is, which was being replaced when a process ended, maybe."""
    new = _new(path)
    return new if files.exists(new) and not files.exists(path) else path


def put(path: Path, step: int, described: Described, notes: Notes) -> None:
    """Write the checkpoint of a step, and read it back.

    One that is damaged, or of another step, is put aside. One of the same run is replaced, and at each moment one of
    the two is there; of the same content it stays as it is.

    Raises:
        CheckpointError: when there is one of another run with other content, or the disk does not take it.
        OSError: when a name cannot be changed.
    """
    settle(path, step)
    before = _whole(path, step)
    if before is None:
        if files.exists(path):
            files.rename(path, path.parent / f"damaged-{path.name}-{uuid.uuid4().hex}")
        write(path, described, notes)
        verify(path)
        return
    new = _new(path)
    write(new, described, notes)
    after = verify(new)
    if _content(after) != _content(before) and after.run == before.run:
        settle(path, step)
        return
    # With the name of the new one that of the old came to the disk, which a save that failed may not have seen to.
    discard(new)
    if _content(after) != _content(before):
        raise CheckpointError(
            f"Checkpoints.save: {path} is of another run, {before.run}, and differs from what was to be saved; go on "
            "from it (latest() loads it), or use another directory"
        )


def settle(path: Path, step: int) -> None:
    """Let a checkpoint take the place of the one that it replaces.

    Raises:
        OSError: when a name cannot be changed.
    """
    new = _new(path)
    if not files.exists(new):
        return
    if files.exists(path):
        if _whole(new, step) is None:
            discard(new)
            return
        doomed = _aside(path)
        files.rename(path, doomed)
        files.rename(new, path)
        # Else the old one could have its name still, and a part of its files no more.
        files.sync_directory(path.parent)
        files.remove(doomed)
    else:
        files.rename(new, path)
        files.sync_directory(path.parent)


def discard(path: Path) -> None:
    """Remove a checkpoint so that no part of it is ever taken for one.

    Raises:
        OSError: when it cannot be removed.
    """
    doomed = _aside(path)
    files.rename(path, doomed)
    files.remove(doomed)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}{NEW}")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def _whole(path: Path, step: int) -> Manifest | None:
    """The manifest of a checkpoint, if it is one of this step, and whole."""
    try:
        manifest = verify(path)
    except CheckpointError:
        return None
    return manifest if manifest.step == step else None


def _content(manifest: Manifest) -> bytes:
    """All of a manifest that says what was saved, and not by whom and where."""
    return dump(dataclasses.replace(manifest, run="", environment={}))
