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
"""``record -> None``. If it has a method ``rewind(step, count)``, this is called before the first record of a run that
resumes. It must remove the records of later steps, and of this step all but the first ``count``."""


def jsonl(path: str | Path) -> Logger:
    """Return a logger that appends each record to a file as one line of JSON.

    The folder is created if it is missing. Tensors become numbers, which waits for the device. NaN and infinities
    become null, and other values that JSON lacks become text. Each line is written at once: if a run is killed, only
    its last line can be incomplete, and the next record starts a new line. A run that resumes from a checkpoint removes
    its lines of later steps, which it makes again; lines of earlier runs in the file stay.

    Raises:
        OptionError: `path` is not a path.
        FtrainError: by the logger, if the file cannot be written, as on a full disk.
    """
    path = as_path("jsonl", "path", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _JsonLines(path)


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"jsonl({str(self._path)!r})"

    def __call__(self, record: Record) -> None:
        (numbers,) = read_metrics([record])  # `fit` passes numbers, other loops may pass tensors.
        line = json.dumps(_to_json(numbers), allow_nan=False, default=str)
        try:
            start = "" if _ends_with_whole_line(self._path) else "\n"
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{start}{line}\n")
        except OSError as error:  # The error of a full disk does not name the file.
            raise FtrainError(
                f"jsonl: {str(self._path)!a} could not be written: {error}; make room, or choose another path"
            ) from error

    def rewind(self, step: int, count: int) -> None:
        """Remove the lines of later steps, all but the first `count` of this step, and an incomplete line.

        Only lines of the last run in the file are removed. It starts at the last line whose step is smaller than the
        one before.
        """
        if not self._path.is_file():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        steps = [_step(line) for line in lines]
        start, previous = 0, -math.inf
        for index, number in enumerate(steps):
            if number < previous:
                start = index
            if number < math.inf:
                previous = number
        end, lines_of_step = len(lines), 0
        for index in range(start, len(lines)):
            lines_of_step += steps[index] == step
            if step < steps[index] < math.inf or lines_of_step > count or not lines[index].endswith(b"\n"):
                end = index  # Steps of a run only rise, so all lines from here on go.
                break
        # In place: a new file would need disk space, and lose the mode and the links of this one.
        os.truncate(self._path, sum(map(len, lines[:end])))


def _ends_with_whole_line(path: Path) -> bool:
    """Whether a file ends with a whole line; also if it is empty, missing or not a regular file."""
    if not path.is_file() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _step(line: bytes) -> float:
    """Return the step of a line; infinity if the line is not a record."""
    try:
        step = json.loads(line)["step"]
        return step if isinstance(step, int) else float(step)  # Floats hold integers up to 2**53 only.
    except (ValueError, KeyError, TypeError):
        return math.inf


def _to_json(value: Any) -> Any:
    """Return a value with None in place of NaN and infinities, and with names of dicts as text."""
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
