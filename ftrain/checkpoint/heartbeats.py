"""Heartbeats that ranks write once per second (`ftrain.parallel.deadline`), read by a rank that waits for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ftrain._torch.store import heartbeat_key

PATIENCE = 3.0
"""Seconds between two reads of the others' heartbeats."""
SILENCE = 20.0
"""Seconds without a heartbeat after which a rank counts as dead, and seconds that a failed rank has to come."""

SHORTEST_WAIT, LONGEST_WAIT = 0.0005, 0.1
"""Seconds between two looks for the ranks that have not come: at first, and at last."""


class GaveUp(NamedTuple):
    """After how many seconds a rank has stopped to wait for others, and why; empty when that is not known."""

    waited: float
    why: str


def wait_for_ranks(
    table: Any,
    ranks: tuple[int, int],
    have_come: Callable[[], bool],
    absent: Callable[[], Sequence[int]],
    *,
    in_order: bool,
    abandoned: threading.Event | None = None,
) -> GaveUp | None:
    """Wait until all ranks have come, or one of them will not, or the timeout of the process group is over.

    Args:
        table: the store of the process group.
        ranks: the number of this rank, and how many there are.
        have_come: returns whether all have.
        absent: returns those that have not.
        in_order: as in `Heartbeats.why_absent`.
        abandoned: stops to wait when it is set.

    Returns:
        None when all have come.
    """
    heartbeats, abandoned = Heartbeats(table, *ranks), abandoned or threading.Event()
    waited, looked, pause = 0.0, 0.0, SHORTEST_WAIT
    while not have_come():
        is_late = waited > table.timeout.total_seconds() or abandoned.is_set()
        if is_late or waited - looked > PATIENCE:
            looked, why = waited, heartbeats.why_absent(absent, waited, in_order=in_order)
            if is_late or why:
                return GaveUp(waited, why)
        abandoned.wait(pause)
        waited, pause = waited + pause, min(2 * pause, LONGEST_WAIT)
    return None


class Heartbeats:
    """Tells whether the ranks for which this one waits can still come. Ranks without a mesh write no heartbeats.

    Args:
        table: the store of the process group.
        rank: the number of this rank.
        size: number of ranks.
    """

    def __init__(self, table: Any, rank: int, size: int) -> None:
        self._table, self._rank, self._size = table, rank, size
        self._silence = min(SILENCE, table.timeout.total_seconds())
        self._notes: dict[int, Any] = {}
        self._heard_at: dict[int, float] = {}

    def why_absent(self, absent: Callable[[], Sequence[int]], waited: float, *, in_order: bool) -> str:
        """Return why one of the ranks that have not come will not; empty if all still may.

        Args:
            absent: function that returns those ranks.
            waited: number of seconds that this rank has waited.
            in_order: whether this rank waits in the thread that makes its steps, so that a rank in a later
                step does not come.
        """
        # Before asking who is absent: what a rank writes after it came does not count.
        earlier, self._notes = self._notes, {rank: self._told_by(rank) for rank in range(self._size)}
        own_note = self._notes[self._rank]
        for rank in absent():
            note = self._notes[rank]
            if own_note is None or note is None:
                continue
            is_new = earlier.get(rank) not in (None, note)
            if is_new:
                self._heard_at[rank] = waited
            place = f"{note['doing']} step {note['number']}{note['place']}"
            if note["has_ended"]:
                return f"the program of rank {rank} has ended {place}"
            # What was written since the last read is not older than this call.
            if in_order and (note["number"] > own_note["number"] or (note["waits"] and is_new)):
                return f"rank {rank} is {place}"
            # It may have caught the error, and still come.
            if note["failure"] and waited >= self._silence:
                return f"rank {rank} failed {place}: {note['failure']}"
            if waited - self._heard_at.get(rank, 0.0) > self._silence:
                return f"rank {rank} died or hangs, and was {place} when it was last heard of"
        return ""

    def _told_by(self, rank: int) -> Any:
        key = heartbeat_key(rank)
        return json.loads(self._table.get(key)) if self._table.check([key]) else None
