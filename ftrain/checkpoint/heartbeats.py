"""Heartbeats that ranks write once per second (`ftrain.parallel.rank_watch`), read by a rank that waits for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PATIENCE = 3.0
"""Seconds between two reads of the others' heartbeats."""
SILENCE = 20.0
"""Seconds without a heartbeat after which a rank counts as dead, and seconds that a failed rank has to arrive."""

SHORTEST_WAIT, LONGEST_WAIT = 0.0005, 0.1
"""Seconds between two requests whether all ranks have arrived: at first, and at most."""


class GaveUp(NamedTuple):
    """The seconds after which a rank stopped waiting for others, and the reason; "" when it is not known."""

    waited: float
    why: str


def heartbeat_key(rank: int) -> str:
    """Return the key of the store under which a rank writes its heartbeats.

    A heartbeat is a JSON object with ``number``, that of its step; ``results``, how often the loss has returned in
    it; ``failure``, the text of the error that has ended the rank, or empty; ``has_ended``, whether its program has;
    and ``waits``, whether it waits for all others.
    """
    return f"ftrain/watch/{rank}"


def wait_for_ranks(
    store: Any,
    ranks: tuple[int, int],
    have_come: Callable[[], bool],
    absent: Callable[[], Sequence[int]],
    *,
    in_order: bool,
    abandoned: threading.Event | None = None,
) -> GaveUp | None:
    """Wait until all ranks have arrived; return None, or a `GaveUp` when one cannot arrive or the wait has timed out.

    `ranks` are this rank and the number of ranks. `have_come` returns whether all have arrived, in one request, and
    `absent` those that have not. `in_order` is as in `Heartbeats.why_absent`; `abandoned` ends the wait.
    """
    heartbeats, abandoned = Heartbeats(store, *ranks), abandoned or threading.Event()
    waited, looked, pause = 0.0, 0.0, SHORTEST_WAIT
    while not have_come():
        is_late = waited > store.timeout.total_seconds() or abandoned.is_set()
        if is_late or waited - looked > PATIENCE:
            looked, why = waited, heartbeats.why_absent(absent, waited, in_order=in_order)
            if is_late or why:
                return GaveUp(waited, why)
        abandoned.wait(pause)
        waited, pause = waited + pause, min(2 * pause, LONGEST_WAIT)
    return None


class Heartbeats:
    """Reads the heartbeats of `size` ranks. Ranks without a mesh write none."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._silence = min(SILENCE, store.timeout.total_seconds())
        self._notes: dict[int, Any] = {}
        self._heard_at: dict[int, float] = {}

    def why_absent(self, absent: Callable[[], Sequence[int]], waited: float, *, in_order: bool) -> str:
        """Return why one of the absent ranks cannot arrive any more; "" if all still may.

        `waited` are the seconds so far. With `in_order` this rank waits between its steps, or after its loss: one that
        is in a later step, or whose loss has returned more often, has passed by. A thread that writes in the background
        waits while all ranks make more steps.
        """
        # Before asking who is absent: what a rank writes after it has arrived does not count.
        earlier, self._notes = self._notes, {rank: self._read(rank) for rank in range(self._size)}
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
            if in_order and (_progress(note) > _progress(own_note) or (note["waits"] and is_new)):
                return f"rank {rank} is {place}"
            # It may have caught the error, and still arrive.
            if note["failure"] and waited >= self._silence:
                return f"rank {rank} failed {place}: {note['failure']}"
            if waited - self._heard_at.get(rank, 0.0) > self._silence:
                return f"rank {rank} died or hangs, and was {place} when it was last heard of"
        return ""

    def _read(self, rank: int) -> Any:
        key = heartbeat_key(rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _progress(note: dict[str, Any]) -> tuple[int, int]:
    return note["number"], note["results"]
