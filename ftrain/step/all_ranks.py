"""Wait until every rank has called a function that exchanges tensors, before any of them does.

A rank that calls it alone would exchange with a step of the others: it would hang, or get the tensors of that step.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from ftrain._torch import store
from ftrain.errors import RankError

SHORTEST_WAIT, LONGEST_WAIT = 0.0005, 0.05
"""Seconds between two looks for the other ranks: at first, and at last."""
PATIENCE = 3.0
"""Seconds until the first look at what the other ranks do, and between two such looks: they tell it every second."""


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
    waited, looked, pause = 0.0, 0.0, SHORTEST_WAIT
    earlier: dict[int, Any] = {}
    while table.add(meeting, 0) < size:
        is_late = waited > table.timeout.total_seconds()
        if is_late or waited - looked > PATIENCE:
            looked, earlier = waited, _require_that_others_come(table, name, number, rank, size, earlier)
        if is_late:
            raise _alone(name, rank, f"rank {_absent(table, number, size)[0]} did not within {waited:.0f} seconds")
        threading.Event().wait(pause)
        waited, pause = waited + pause, min(2 * pause, LONGEST_WAIT)
    if rank == 0:  # All have seen the end of the meeting before.
        table.delete_key(f"ftrain/meeting/{number - 1}")


def _require_that_others_come(
    table: Any, name: str, number: int, rank: int, size: int, earlier: dict[int, Any]
) -> dict[int, Any]:
    """Check that no rank has told of what shows that it does not come; return what they have told."""
    own_note, notes = _note_of(table, rank), {other: _note_of(table, other) for other in _absent(table, number, size)}
    for other, note in notes.items():
        if own_note is None or note is None:
            continue
        place = f"{note['doing']} step {note['number']}{note['place']}"
        if note["failure"]:
            raise _alone(name, rank, f"rank {other} failed {place}: {note['failure']}")
        if note["has_ended"]:
            raise _alone(name, rank, f"the program of rank {other} has ended {place}")
        # What was told since the last look is no older than this call.
        is_new = earlier.get(other) not in (None, note)
        if note["number"] > own_note["number"] or (note["waits"] and is_new):
            raise _alone(name, rank, f"rank {other} is {place}")
    return notes


def _alone(name: str, rank: int, other: str) -> RankError:
    return RankError(
        f"{name}: rank {rank} has called it, and {other}. The ranks exchange tensors in it, so every rank must call "
        "it; then one alone may write or print what it returns"
    )


def _absent(table: Any, number: int, size: int) -> list[int]:
    return [rank for rank in range(size) if table.add(_calls(rank), 0) < number]


def _note_of(table: Any, rank: int) -> Any:
    key = store.sign_of_life(rank)
    return json.loads(table.get(key)) if table.check([key]) else None


def _calls(rank: int) -> str:
    return f"ftrain/meetings/{rank}"
