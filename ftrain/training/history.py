"""The records of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ftrain.errors import OptionError
from ftrain.tree.name_patterns import near
from ftrain.types import PyTree


class History(list[dict[str, Any]]):
    """The records of a run, one for each step and each evaluation.

    >>> History([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])["loss"]
    [2.0, 1.0]
    """

    stopped: str = ""
    """Why the run ended: ``"steps"``, ``"data"``, ``"interrupt"``, or what `stop` said."""

    def __repr__(self) -> str:
        """Return the number of records and the names in them, which is short however many there are."""
        names = dict.fromkeys(name for record in self for name in record)
        columns = f" of {', '.join(names)}" if names else ""
        ended = f", ended by {self.stopped}" if self.stopped else ""
        return f"History of {len(self):,} records{columns}{ended}"

    def __getitem__(self, key: Any) -> Any:
        """Return a record by its position, or a column by its name. Raises an OptionError for a name without values."""
        return column("history", key, self) if isinstance(key, str) else super().__getitem__(key)


def column(function: str, name: str, history: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the values of a metric, one for each record that has it.

    Raises an OptionError in the name of `function` when there are records, and none has it.
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
    """Return the records of a checkpoint of an earlier format, which has a table for records with the same names.

    It is ``{"tables": [{name: column}], "order": the number of the table of each record}``.
    """
    tables = [
        [dict(zip(table, row, strict=True)) for row in zip(*map(_values, table.values()), strict=True)]
        for table in packed["tables"]
    ]
    rows = [iter(table) for table in tables]
    return History([next(rows[number]) for number in _values(packed["order"])])


def _values(column: Any) -> list[Any]:
    """Return the numbers of a column of a checkpoint, which is on the host: nothing waits for the device."""
    return column.tolist() if isinstance(column, torch.Tensor) else column
