"""The records of a run."""

from __future__ import annotations

from typing import Any

import torch

from ftrain.types import PyTree


class History(list[dict[str, Any]]):
    """The records of a run, one for each step and each evaluation.

    >>> History([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])["loss"]
    [2.0, 1.0]
    """

    stopped: str = ""
    """Why the run ended: ``"steps"``, ``"data"``, ``"interrupt"``, or what `stop` said."""

    def __getitem__(self, key: Any) -> Any:
        """Return a record by its position, or a column by its name."""
        return [record[key] for record in self if key in record] if isinstance(key, str) else super().__getitem__(key)


def unpack(packed: PyTree) -> History:
    """Return the records that a checkpoint of before ftrain 0.2 holds, as columns of those of the same names."""
    tables = [
        [dict(zip(table, row, strict=True)) for row in zip(*map(_values, table.values()), strict=True)]
        for table in packed["tables"]
    ]
    rows = [iter(table) for table in tables]
    return History([next(rows[number]) for number in _values(packed["order"])])


def _values(column: Any) -> list[Any]:
    """The numbers of a column; it is on the host, so that nothing waits."""
    return column.tolist() if isinstance(column, torch.Tensor) else column
