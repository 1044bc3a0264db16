"""Where records of a run go. A logger is any function of a record, which is a flat dict of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = Mapping[str, Any]
Logger: TypeAlias = Callable[[Record], None]
"""May have a method ``rewind(step, count)``: a run goes on, of which ``count`` records of that step are the last."""


def jsonl(path: str | Path) -> Logger:
    """Return a logger that appends each record to a file as one line of JSON.

    The folder is made when it is missing. Numbers that JSON lacks (NaN, infinities) become null. Each
    line is written out at once, so that a killed run leaves only whole lines. A run that goes on from a
    checkpoint removes the lines of later steps, which it makes again.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _Lines(path)


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, record: Record) -> None:
        """Append a record."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False) + "\n")

    def rewind(self, step: int, count: int) -> None:
        """Remove what came after the first `count` records of a step, and a line that was cut off."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        steps = [_step(line) for line in lines]
        before = [line for line, of in zip(lines, steps, strict=True) if of < step]
        at = [line for line, of in zip(lines, steps, strict=True) if of == step]
        kept = self._path.with_name(f"{self._path.name}.tmp")
        kept.write_text("".join(before + at[:count]), encoding="utf-8")
        kept.replace(self._path)


def _step(line: str) -> float:
    """The step of a line; that of no step for one that is not whole."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def rewind(loggers: Sequence[Logger], step: int, count: int) -> None:
    """Make loggers that can forget what came after so many records of a step."""
    for logger in loggers:
        if callable(again := getattr(logger, "rewind", None)):
            again(step, count)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
