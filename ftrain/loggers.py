"""Where records of a run go. A logger is any function of a record, which is a flat dict of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = Mapping[str, Any]
Logger: TypeAlias = Callable[[Record], None]


class History(list[dict[str, Any]]):
    """The records of a run, one for each step and each evaluation.

    >>> History([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])["loss"]
    [2.0, 1.0]
    """

    stopped: str = ""
    """Why the run ended: ``"steps"``, ``"data"`` or ``"interrupt"``."""

    def __getitem__(self, key: Any) -> Any:
        """Return a record by its position, or a column by its name."""
        return [record[key] for record in self if key in record] if isinstance(key, str) else super().__getitem__(key)


def jsonl(path: str | Path) -> Logger:
    """Return a logger that appends each record to a file as one line of JSON.

    The folder is made when it is missing. Numbers that JSON lacks (NaN, infinities) become null. Each
    line is written out at once, so that a killed run leaves only whole lines.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)

    def log(record: Record) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False) + "\n")

    return log


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
