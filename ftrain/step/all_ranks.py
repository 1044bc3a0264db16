"""Wait until every rank has called a function that exchanges tensors, before any of them does.

A rank that calls it alone would exchange with a step of the others: it would hang, or get the tensors of that step.
"""

from __future__ import annotations

import threading
from typing import Any

from ftrain._torch import store
from ftrain.checkpoint import signs_of_life
from ftrain.errors import RankError

SHORTEST_WAIT, LONGEST_WAIT = 0.0005, 0.05
"""Seconds between two looks for the other ranks: at first, and at last."""


def require_all_ranks(name: str) -> None:
    """Wait until all ranks have called the function `name`; nothing travels but a few numbers in torch's store.

    Ranks that are threads of one process, as in tests, do not wait.

    Args:
        name: of the function, as users write it.

    Raises:
        RankError: when a rank has gone on without it, has failed or ended, or does not come before the timeout of the
            process group.
    """
    rank, size = store.rank_and_size()
    if size == 1 or not store.are_processes():
        return
    table = store.store()
    number = table.add(_calls(rank), 1)
    meeting = f"ftrain/meeting/{number}"
    table.add(meeting, 1)
    signs, waited, looked, pause = signs_of_life.SignsOfLife(table, rank, size), 0.0, 0.0, SHORTEST_WAIT
    while table.add(meeting, 0) < size:
        is_late = waited > table.timeout.total_seconds()
        if is_late or waited - looked > signs_of_life.PATIENCE:
            looked, why = waited, signs.why_absent(lambda: _absent(table, number, size), waited, in_order=True)
            if why:
                raise _alone(name, rank, why)
        if is_late:
            raise _alone(name, rank, f"rank {_absent(table, number, size)[0]} did not within {waited:.0f} seconds")
        threading.Event().wait(pause)
        waited, pause = waited + pause, min(2 * pause, LONGEST_WAIT)
    if rank == 0:  # All have seen the end of the meeting before.
        table.delete_key(f"ftrain/meeting/{number - 1}")


def _alone(name: str, rank: int, other: str) -> RankError:
    return RankError(
        f"{name}: rank {rank} has called it, and {other}. The ranks exchange tensors in it, so every rank must call "
        "it; then one alone may write or print what it returns"
    )


def _absent(table: Any, number: int, size: int) -> list[int]:
    return [rank for rank in range(size) if table.add(_calls(rank), 0) < number]


def _calls(rank: int) -> str:
    return f"ftrain/meetings/{rank}"
