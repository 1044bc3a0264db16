"""The history of a run: an append-only file of records; each checkpoint holds its length and digest.

A save appends the records since the last save, so its cost does not grow with the run. A run that resumes from a
checkpoint cuts off the records that were appended after that checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ftrain.checkpoint import files
from ftrain.checkpoint.directory_lock import system_errors
from ftrain.checkpoint.manifest import DIGEST, Manifest
from ftrain.checkpoint.reading import error_names
from ftrain.checkpoint.treedef import MALFORMED, flatten, items_by_path, require_loadable, unflatten
from ftrain.errors import CheckpointError

NAME = "ftrain-history.jsonl"
ENCODE = json.JSONEncoder(separators=(",", ":")).encode
EXACT_TYPES = str, int, float, type(None)
"""Types that JSON restores exactly."""


class Mark(NamedTuple):
    """The records that belong to a checkpoint: their number, their length in bytes, and the sha256 of these bytes."""

    records: int
    bytes: int
    sha256: str


def parse_mark(saved: Any) -> Mark | None:
    """Return the mark that a checkpoint holds; None if `saved` is not a mark, as in checkpoints of older versions."""
    if not isinstance(saved, dict) or saved.keys() != set(Mark._fields):
        return None
    mark = Mark(**saved)
    are_counts = all(type(value) is int and value >= 0 for value in (mark.records, mark.bytes))
    is_digest = isinstance(mark.sha256, str) and DIGEST.fullmatch(mark.sha256)
    return mark if are_counts and is_digest else None


def mark_of(manifest: Manifest) -> Mark | None:
    """Return how much of the history belongs to a checkpoint.

    None if `fit` did not save the checkpoint, or saved it in an earlier format, in which it holds the records itself.
    """
    items = items_by_path(manifest.tree, manifest.tensors)
    return parse_mark({name: items.get(("run", "record", "history", name)) for name in Mark._fields})


class Journal:
    """Appends to the history of the run in a directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._mark, self._digest = Mark(0, 0, ""), hashlib.sha256()

    def continue_after(self, mark: Mark | None) -> None:
        """Append after a mark from now on, or at the start for None; the next append removes the later records."""
        self._digest = hashlib.sha256() if mark is None else check(self._path.parent, mark)
        self._mark = mark or Mark(0, 0, "")

    @property
    def exists(self) -> bool:
        """Whether a run has called `begin` or appended records in this directory."""
        return files.exists(self._path)

    def begin(self) -> None:
        """Make the file, if it is missing. Raises a CheckpointError if that fails."""
        with system_errors(self._path.parent):
            files.touch(self._path)

    def prepare_append(self, records: Sequence[Mapping[str, Any]]) -> tuple[Mark, Callable[[], None]]:
        """Return the mark after all `records` of the run, and a function that writes those that are new to the disk.

        Raises a CheckpointError for a record that cannot be saved exactly, or if writing fails.
        """
        saved_mark, digest = self._mark, self._digest.copy()
        data = b"".join(map(_line, records[saved_mark.records :]))
        digest.update(data)
        mark = Mark(len(records), saved_mark.bytes + len(data), digest.hexdigest())

        def append() -> None:
            try:
                files.append(self._path, data, saved_mark.bytes)
            except OSError as error:
                raise CheckpointError(f"save: {self._path} could not be written: {error}") from error
            self._mark, self._digest = mark, digest

        return mark, append


def check(directory: Path, mark: Mark) -> hashlib._Hash:
    """Verify every byte of the records up to a mark, and return their hash object, which more bytes can be added to.

    Raises a CheckpointError when they are not the bytes that were saved.
    """
    digest = hashlib.sha256(_read_bytes(directory / NAME, mark))
    if digest.hexdigest() != mark.sha256:
        raise CheckpointError(
            f"{directory / NAME}: the first {mark.bytes:,} bytes are not those that were saved; restore them, or "
            "load the state by itself (ftrain.checkpoint.load) and start in another directory"
        )
    return digest


def read(directory: Path, mark: Mark) -> list[dict[str, Any]]:
    """Return the records up to a mark; call `check` first."""
    return [_record(line) for line in _read_bytes(directory / NAME, mark).splitlines()]


def _read_bytes(path: Path, mark: Mark) -> bytearray:
    """Return the bytes of the records up to a mark, not verified. Raises a CheckpointError if there are fewer."""
    if not mark.bytes:
        return bytearray()
    with error_names(path):
        if not files.exists(path):
            raise CheckpointError(
                "is missing; it has the history of the run. Copy it with the checkpoints, or load the state by itself "
                "(ftrain.checkpoint.load) and start in another directory"
            )
        with files.opened(path) as descriptor:
            length = files.size(descriptor)
            if length < mark.bytes:
                raise CheckpointError(f"has {length:,} bytes, and {mark.bytes:,} were saved: it was cut off")
            data = bytearray(mark.bytes)
            files.read_into(descriptor, memoryview(data), 0)
            return data


def _line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON. Raises a CheckpointError if JSON cannot hold it exactly."""
    for name in record:
        if type(name) is not str:
            raise CheckpointError(f"save: a record of the history has the name {name!r}; needs a str")
    encoded = {name: value if _is_exact(value) else _encode(name, value) for name, value in record.items()}
    return ENCODE(encoded).encode() + b"\n"


def _is_exact(value: Any) -> bool:
    """Whether JSON restores a value exactly without `_encode`."""
    return isinstance(value, EXACT_TYPES) or (type(value) is list and all(map(_is_exact, value)))


def _encode(name: str, value: Any) -> Any:
    """Return a value as the JSON object that a manifest would hold for it."""
    flat = flatten({name: value})
    if flat.leaves:
        raise CheckpointError(f"save: the history has a tensor in {name}; needs numbers, texts and lists of them")
    require_loadable("save", f"{name} of the history", value)
    return flat.treedef["nodes"][0]


def _record(line: bytearray) -> dict[str, Any]:
    try:
        record = json.loads(line)
        return {name: unflatten(value, {}) if isinstance(value, dict) else value for name, value in record.items()}
    except MALFORMED as error:
        raise CheckpointError(f"{NAME}: has a line that is not a record: {bytes(line[:60])!r}") from error
