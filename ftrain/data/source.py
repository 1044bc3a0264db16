"""The interface between a `Loader` and what gives it batches: a map-style or an iterable dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ftrain.data.fetched_batch import FetchedBatch, Position


class Source(Protocol):
    """Gives the batches of any epoch, from any position in it."""

    start: Position
    """The position at which an epoch starts; its keys are in every position."""

    optional_keys: tuple[str, ...]
    """Further keys that a position may have."""

    fingerprint: dict[str, Any]
    """The options on which the order of batches depends. A saved position is valid only for equal ones."""

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if unknown."""

    def for_state(self, state: Mapping[str, Any]) -> Source:
        """Return the source that has the order of a saved state, which an earlier version may have written."""

    def position_error(self, position: Position) -> str | None:
        """Return what is wrong with a position; None if it is valid."""

    def batches(self, epoch: int, position: Position) -> Iterator[FetchedBatch]:
        """Yield the batches of an epoch that follow a position."""
