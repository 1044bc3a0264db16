"""Gathers that start before they are needed, so that what travels overlaps with what computes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ftrain.parallel.gather import Parameters
from ftrain.parallel.partition import Results

LARGEST = 4 << 30
"""Bytes of parameters above which nothing is gathered ahead: the memory would be missing for what computes."""


class GatherAhead:
    """The gathers of one loss, of which one at most is started ahead.

    Ranks must start the same ones in one order: a guess may depend on what all ranks do alike, and on nothing else.

    Args:
        params: those that are gathered.
    """

    def __init__(self, params: Parameters) -> None:
        self._params = params
        self._names: Sequence[str] = ()
        self._results: Results | None = None

    def start(self, names: Sequence[str]) -> None:
        """Start to gather these parameters, which are probably needed next."""
        self.drop()
        if names and self._params.whole_bytes(names) <= LARGEST:
            self._names, self._results = names, self._params.start_gather(names)

    def take(self, names: Sequence[str]) -> list[Tensor]:
        """Return whole parameters, whether their gather was started ahead or not."""
        if self._results is None or list(names) != list(self._names):
            self.drop()
            return self._params.start_gather(names)()
        results, self._results = self._results, None
        return results()

    def drop(self) -> None:
        """Free what was started and is not needed."""
        # A collective that nothing waits for stays in memory.
        results, self._results = self._results, None
        if results is not None:
            results()
