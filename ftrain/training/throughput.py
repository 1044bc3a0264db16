"""How fast a run trains: steps and items per second since the last time that someone asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ftrain.types import PyTree

Count: TypeAlias = Callable[[PyTree], int]
"""``batch -> number of items in it``, such as tokens."""


class Throughput:
    """Counts steps and items, and turns them into rates.

    Args:
        start: the time at which counting starts, in seconds of `time.perf_counter`.
        counts: name of a kind of items -> how many of them a batch holds.
    """

    def __init__(self, start: float, counts: Mapping[str, Count]) -> None:
        self._start, self._counts = start, counts
        self._steps, self._items = 0, dict.fromkeys(counts, 0.0)
        self._of_rank = dict.fromkeys(counts, 0.0)

    def add(self, batch: PyTree) -> None:
        """Count one step and the items of its batch, which enter the rates with the next `total`."""
        self._steps += 1
        for name, count in self._counts.items():
            self._of_rank[name] += count(batch)

    def total(self, sums: Callable[[list[float]], list[float]]) -> None:
        """Add what was counted to what the run has, given what turns numbers of this rank into those of the run."""
        for name, count in zip(self._counts, sums([*self._of_rank.values()]), strict=True):
            self._items[name] += count
            self._of_rank[name] = 0.0

    def exclude(self, seconds: float) -> None:
        """Leave out time that was not spent on training, such as that of an evaluation."""
        self._start += seconds

    def rates(self, now: float) -> tuple[dict[str, float], float]:
        """Return the items per second by name and the seconds per step, and start counting again."""
        elapsed = max(now - self._start, 1e-9)
        per_second = {name: items / elapsed for name, items in self._items.items()}
        per_step = elapsed / max(self._steps, 1)
        self._start, self._steps, self._items = now, 0, dict.fromkeys(self._counts, 0.0)
        return per_second, per_step
