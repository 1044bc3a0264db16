"""Heartbeats that ranks write once per second (`ftrain.parallel.rank_watch`), read by a rank that waits for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PATIENCE = 3.0
"""Seconds between two reads of the heartbeats of the other ranks."""
SILENCE = 20.0
"""Seconds without a heartbeat after which a rank counts as dead, and seconds that a failed rank has to arrive."""

SHORTEST_WAIT, LONGEST_WAIT = 0.0005, 0.1
"""Seconds between two requests whether all ranks have arrived: at first, and at most."""


class GaveUp(NamedTuple):
    """The seconds that a rank waited for others until it gave up, and why one cannot arrive; "" if that is unknown."""

    waited: float
    why: str


def heartbeat_key(rank: int) -> str:
    """Return the key of the store under which a rank writes its heartbeats.

    A heartbeat is a JSON object with these keys, among others:

    - ``number``: the number of the step of the rank.
    - ``results``: how often the loss has returned in this step.
    - ``doing`` and ``place``: texts that say where in the program the rank is.
    - ``failure``: the text of the error that was raised on the rank; "" if there was none.
    - ``has_ended``: whether the program of the rank has ended.
    - ``waits``: whether the rank waits for all others.
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

    Args:
        store: the store of torch's process group.
        ranks: this rank and the number of ranks.
        have_come: returns whether all ranks have arrived, with one request to the store.
        absent: returns the ranks that have not arrived.
        in_order: as in `Heartbeats.why_absent`.
        abandoned: event that ends the wait when it is set.
    """
    heartbeats, abandoned = Heartbeats(store, *ranks), abandoned or threading.Event()
    waited, last_read, pause = 0.0, 0.0, SHORTEST_WAIT
    while not have_come():
        is_late = waited > store.timeout.total_seconds() or abandoned.is_set()
        if is_late or waited - last_read > PATIENCE:
            why = heartbeats.why_absent(absent, waited, in_order=in_order)
            last_read = waited
            if is_late or why:
                return GaveUp(waited, why)
        abandoned.wait(pause)
        waited += pause
        pause = min(2 * pause, LONGEST_WAIT)
    return None


class Heartbeats:
    """Reads the heartbeats of `size` ranks. Ranks without a mesh write none."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._silence = min(SILENCE, store.timeout.total_seconds())
        self._newest: dict[int, Any] = {}
        self._heard_at: dict[int, float] = {}

    def why_absent(self, absent: Callable[[], Sequence[int]], waited: float, *, in_order: bool) -> str:
        """Return why one of the absent ranks cannot arrive any more; "" if all may still arrive.

        `waited` is the number of seconds so far. `in_order` says that the ranks wait at one point of a step:
        a rank that is in a later step, or whose loss has returned more often, has missed this point. It is False for a
        thread that writes in the background, which waits while all ranks do more steps.
        """
        # Read before `absent` is called: a rank may arrive and then write a heartbeat, which must not count.
        earlier, self._newest = self._newest, {rank: self._read(rank) for rank in range(self._size)}
        this_rank = self._newest[self._rank]
        for rank in absent():
            heartbeat = self._newest[rank]
            if this_rank is None or heartbeat is None:
                continue
            is_new = earlier.get(rank) not in (None, heartbeat)
            if is_new:
                self._heard_at[rank] = waited
            place = f"{heartbeat['doing']} step {heartbeat['number']}{heartbeat['place']}"
            if heartbeat["has_ended"]:
                return f"the program of rank {rank} has ended {place}"
            # A new heartbeat was written during this wait, so the rank waits now, and at another point.
            waits_elsewhere = heartbeat["waits"] and is_new
            if in_order and (_progress(heartbeat) > _progress(this_rank) or waits_elsewhere):
                return f"rank {rank} is {place}"
            # The rank may have caught the error and still arrive, so it gets some time.
            if heartbeat["failure"] and waited >= self._silence:
                return f"rank {rank} failed {place}: {heartbeat['failure']}"
            if waited - self._heard_at.get(rank, 0.0) > self._silence:
                return f"rank {rank} died or hangs, and was {place} when it was last heard of"
        return ""

    def _read(self, rank: int) -> Any:
        """Return the newest heartbeat of a rank; None if it has written none."""
        key = heartbeat_key(rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _progress(heartbeat: dict[str, Any]) -> tuple[int, int]:
    """Return the number of the step of a rank, and how often the loss has returned in it, to compare ranks by."""
    return heartbeat["number"], heartbeat["results"]
