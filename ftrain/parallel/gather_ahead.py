"""Gathers that start before they are needed, so that communication overlaps with computation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ftrain.parallel.gather import Parameters
from ftrain.parallel.partition import Results

LARGEST = 4 << 30
"""Bytes of parameters above which nothing is gathered ahead: the computation needs the memory."""


class GatherAhead:
    """The gathers of one loss, of which at most one is started ahead.

    Ranks must start the same gathers in one order: a guess may depend only on what is the same on all ranks.

    Args:
        params: the parameters that are gathered.
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
        # A collective stays in memory until something waits for it.
        results, self._results = self._results, None
        if results is not None:
            results()
