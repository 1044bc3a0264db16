"""Loggers: functions that get each record of a run, which is a flat dict of numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ftrain.errors import FtrainError, as_path
from ftrain.training.metrics import read_metrics

Record: TypeAlias = Mapping[str, Any]
Logger: TypeAlias = Callable[[Record], None]
"""It may have a method ``rewind(step, count)``, called when a run resumes: this removes the records of later steps, and
of this step all but the first ``count``."""


def jsonl(path: str | Path) -> Logger:
    """Return a logger that appends each record to a file as one line of JSON.

    The folder is created if it is missing. Tensors, which it waits for, become numbers, NaN and infinities null, and
    other values that JSON lacks their text. Each line is written at once: when a run is killed, only its last one can
    be incomplete, and the next record begins a new line. A run that resumes from a checkpoint removes its lines of
    later steps, which it makes again; those of earlier runs in the file stay.

    Raises:
        OptionError: when `path` is no path.
        FtrainError: by the logger, when the file cannot be written, as on a full disk.
    """
    path = as_path("jsonl", "path", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _Lines(path)


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"jsonl({str(self._path)!r})"

    def __call__(self, record: Record) -> None:
        (numbers,) = read_metrics([record])  # In a loop of one's own, metrics are tensors.
        line = json.dumps(_finite(numbers), allow_nan=False, default=str)
        try:
            start = "" if _ends_whole(self._path) else "\n"
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{start}{line}\n")
        except OSError as error:  # That of a full disk does not name the file.
            raise FtrainError(
                f"jsonl: {str(self._path)!a} could not be written: {error}; make room, or choose another path"
            ) from error

    def rewind(self, step: int, count: int) -> None:
        """Remove the lines of later steps, all but the first `count` of this step, and an incomplete line.

        Of the last run in the file: steps begin again where another run has appended its lines.
        """
        if not self._path.is_file():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        steps = [_step(line) for line in lines]
        start, previous = 0, -math.inf
        for index, number in enumerate(steps):
            start = index if number < previous else start
            previous = number if number < math.inf else previous
        end, of_step = len(lines), 0
        for index in range(start, len(lines)):
            of_step += steps[index] == step
            if step < steps[index] < math.inf or of_step > count or not lines[index].endswith(b"\n"):
                end = index
                break
        # The steps of a run only rise. Another file in its place would need room, and lose its mode and the link to it.
        os.truncate(self._path, sum(map(len, lines[:end])))


def _ends_whole(path: Path) -> bool:
    """Return whether a file is missing, empty or no regular file, or ends with a whole line."""
    if not path.is_file() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _step(line: bytes) -> float:
    """Return the step of a line; infinity if the line is no record."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
