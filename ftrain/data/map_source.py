"""A map-style dataset, in batches that are planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ftrain.data.epoch_plan import Plan
from ftrain.data.fetch import Fetched, Place
from ftrain.data.permutation import ORDERS
from ftrain.data.workers import Workers


class Planned:
    """A map-style dataset, whose batches are planned."""

    def __init__(self, plan: Plan, workers: Workers, facts: dict[str, Any]) -> None:
        self.start: Place = {"window": 0, "batch": 0}
        self.optional: tuple[str, ...] = ()
        # A position of version 1 does not name it.
        self.facts = {**facts, "order": plan.order} if plan.order > 1 else facts
        self._facts = facts
        self._plan, self._workers = plan, workers

    @property
    def num_batches(self) -> int | None:
        """How many batches a pass has, where this does not depend on lengths."""
        return self._plan.num_batches

    def as_of(self, state: Mapping[str, Any]) -> Planned:
        """Return the same with batches in the order in which a position was saved."""
        version = state.get("order", 1)
        return Planned(replace(self._plan, order=version), self._workers, self._facts) if version in ORDERS else self

    def check(self, place: Place) -> str | None:
        """Say what is wrong with a place."""
        if place["window"] <= self._plan.num_windows:
            return None
        return f"window is {place['window']}, and a pass has {self._plan.num_windows}"

    def run(self, epoch: int, place: Place) -> Iterator[Fetched]:
        """Go through the rest of a pass: a window is looked at, and nothing before it."""
        return self._workers(self._plan.requests(epoch, place["window"], place["batch"]))
