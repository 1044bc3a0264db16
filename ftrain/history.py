"""The records of a run, and the same as columns of tensors, which a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ftrain.types import PyTree

COLUMNS = {float: torch.float64, int: torch.int64}


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


def pack(records: Sequence[Mapping[str, Any]]) -> PyTree:
    """Return records as columns, exactly: those of the same names together, numbers as tensors.

    >>> pack([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])["tables"][0]["loss"]
    tensor([2., 1.], dtype=torch.float64)
    """
    numbers: dict[tuple[str, ...], int] = {}
    order = [numbers.setdefault(tuple(record), len(numbers)) for record in records]
    tables = []
    for names, number in numbers.items():
        rows = [record for record, of in zip(records, order, strict=True) if of == number]
        tables.append({name: _column([row[name] for row in rows]) for name in names})
    return {"order": torch.tensor(order, dtype=torch.int64), "tables": tables}


def unpack(packed: PyTree) -> History:
    """Return the records of which `pack` made columns."""
    tables = [
        [dict(zip(table, row, strict=True)) for row in zip(*map(_values, table.values()), strict=True)]
        for table in packed["tables"]
    ]
    rows = [iter(table) for table in tables]
    return History([next(rows[number]) for number in _values(packed["order"])])


def _column(values: list[Any]) -> Any:
    kinds = {type(value) for value in values}
    dtype = COLUMNS.get(kinds.pop()) if len(kinds) == 1 else None
    if dtype is None or (dtype is torch.int64 and any(abs(value) >= 2**63 for value in values)):
        return values
    return torch.tensor(values, dtype=dtype)


def _values(column: Any) -> list[Any]:
    """The numbers of a column; it is on the host, so that nothing waits."""
    return column.tolist() if isinstance(column, torch.Tensor) else column
