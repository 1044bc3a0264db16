"""The history of a run: its records, as a list and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ftrain.errors import OptionError
from ftrain.tree.name_patterns import near
from ftrain.types import PyTree

MAX_RECORDS, MAX_COLUMNS = 8, 8
"""The largest number of records and columns that are printed."""
MAX_CELL_WIDTH = 16
"""The largest number of characters of a value that are printed."""


class History(list[dict[str, Any]]):
    """The records of a run, one for each step and each evaluation.

    >>> History([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])["loss"]
    [2.0, 1.0]
    """

    stopped: str = ""
    """Why the run ended: ``"steps"``, ``"data"``, ``"interrupt"``, or the reason that `stop` returned."""

    def __repr__(self) -> str:
        """Return a table of the first and the last records, short however many there are."""
        count, half = len(self), MAX_RECORDS // 2
        shown = [*self[:half], *self[-half:]] if count > MAX_RECORDS else [*self]
        names = list(dict.fromkeys(name for record in shown for name in record))
        columns, more = names[:MAX_COLUMNS], names[MAX_COLUMNS:]
        rows = [columns, *([_text(record.get(name, "")) for name in columns] for record in shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if count > MAX_RECORDS:
            lines.insert(1 + half, "...")
        if more:
            lines.append(f"and {', '.join(more[:MAX_COLUMNS])}{', ...' if len(more) > MAX_COLUMNS else ''}")
        title = f"History of {count:,} {'record' if count == 1 else 'records'}"
        if self.stopped:
            title += f", ended by {self.stopped}"
        return "\n".join([title, *lines]).rstrip()

    def __getitem__(self, key: Any) -> Any:
        """Return a record by its position, or a column by its name. Raises an OptionError for a name without values."""
        return column("history", key, self) if isinstance(key, str) else super().__getitem__(key)


def column(function: str, name: str, history: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the values of a metric, one for each record that has it.

    Raises an OptionError that names `function` if there are records, but none has it.
    """
    values = [record[name] for record in history if name in record]
    if not values and len(history):
        names = list(dict.fromkeys(key for record in history for key in record))
        names.sort(key=lambda key: key != f"eval_{name}")
        raise OptionError(
            f"{function}: nothing is recorded as {name!r}; there are {near(name, names)}. What evaluate= returns is "
            "recorded with eval_ before its name"
        )
    return values


def record_of(history: History, step: int) -> dict[str, Any]:
    """Return the records of the newest step, its evaluations included, as one record; {} for an earlier step."""
    combined: dict[str, Any] = {}
    for record in reversed(history):
        if record["step"] != step:
            break
        combined = {**record, **combined}
    return combined


def unpack(packed: PyTree) -> History:
    """Return the records of a checkpoint of an earlier format.

    It has a table for the records with the same names, and the index of the table of each record:
    ``{"tables": [{name: column}], "order": indices}``.
    """
    tables = [
        [dict(zip(table, row, strict=True)) for row in zip(*map(_values, table.values()), strict=True)]
        for table in packed["tables"]
    ]
    remaining = [iter(table) for table in tables]
    return History([next(remaining[index]) for index in _values(packed["order"])])


def _values(column: Any) -> list[Any]:
    """Return the numbers of a column of a checkpoint, which is on the host: nothing waits for the device."""
    return column.tolist() if isinstance(column, torch.Tensor) else column


def _text(value: Any) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value).replace("\n", " ")
    return text if len(text) <= MAX_CELL_WIDTH else f"{text[: MAX_CELL_WIDTH - 3]}..."
