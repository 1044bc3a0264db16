"""Passes over a dataset, whose position is a few whole numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ftrain.data.fetch import Failure, Fetched, Place
from ftrain.errors import ComposeError, DataError
from ftrain.types import PyTree


class Source(Protocol):
    """What passes are made from."""

    start: Place
    """Where a pass begins."""

    optional: tuple[str, ...]
    """What a place may hold besides."""

    facts: dict[str, Any]
    """What must be the same for a position to mean the same."""

    @property
    def num_batches(self) -> int | None:
        """How many batches a pass has, if that is known."""

    def as_of(self, state: Mapping[str, Any]) -> Source:
        """Return the source with the order that a position was saved in, which may be that of an earlier version."""

    def check(self, place: Place) -> str | None:
        """Say what is wrong with a place."""

    def run(self, epoch: int, place: Place) -> Iterator[Fetched]:
        """Go through the rest of a pass."""


class Loader:
    """Passes over a dataset; each `iter` is one, and each that is finished is followed by the next epoch's.

    A pass that is left unfinished starts over where it began. `skipped` counts the bad samples that were left out.
    """

    def __init__(self, source: Source, num_ranks: int = 1) -> None:
        self.skipped = 0
        self._source, self._num_ranks = source, num_ranks
        self._epoch, self._start, self._at = 0, source.start, source.start
        self._skipped_before, self._warned = 0, False
        self._pass = 0

    def __len__(self) -> int:
        """Return the number of batches of a whole pass.

        Raises:
            ComposeError: where it is not known, because it depends on lengths, or on what a stream holds.
        """
        count = self._source.num_batches
        if count is None:
            raise ComposeError(
                "len(loader): how many batches a pass has depends on the lengths of all samples, or on what a stream "
                "holds; count in steps instead"
            )
        return count

    def __iter__(self) -> Iterator[PyTree]:
        self._pass += 1
        self._at, self.skipped = self._start, self._skipped_before
        return self._passing(self._pass)

    def _passing(self, number: int) -> Iterator[PyTree]:
        self._require_latest(number)
        for fetched in self._source.run(self._epoch, self._start):
            if fetched.failure is not None:
                raise _failed(fetched.failure, '; repair it, or pass on_error="skip" to go on without such samples')
            self._at = fetched.after
            self._count(fetched.skipped)
            if fetched.empty:
                self._require_one_rank(fetched.skipped)
                continue
            yield fetched.batch
            self._require_latest(number)
        self._epoch += 1
        self._start = self._at = self._source.start
        self._skipped_before = self.skipped

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands after the batches that it has yielded, and what that depends on.

        It is the same on every rank, `skipped` aside.
        """
        return {"epoch": self._epoch, **self._at, "skipped": self.skipped, **self._source.facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned: the next pass has the batches that were left.

        After a position that an earlier version saved, this pass and those that follow keep that version's order.

        Raises:
            DataError: when it is no such state, or of a loader of other data or options; lists what differs.
        """
        source = self._source.as_of(state)
        wrong = _differences(source, state)
        if wrong:
            raise DataError(
                "Loader.load_state_dict: the position does not fit this loader:\n  "
                + "\n  ".join(wrong)
                + "\nMake the loader as it was when the position was saved, or begin without it"
            )
        optional = {name: state[name] for name in source.optional if name in state}
        self._source = source
        self._pass += 1
        self._epoch = state["epoch"]
        self.skipped = self._skipped_before = state["skipped"]
        self._start = self._at = {**{name: state[name] for name in self._source.start}, **optional}

    def _require_latest(self, number: int) -> None:
        if number != self._pass:
            raise DataError(
                "loader: an earlier pass goes on after another one was begun, or a position was loaded; a loader makes "
                "one pass at a time: use a loader each"
            )

    def _require_one_rank(self, bad: Sequence[Failure]) -> None:
        if self._num_ranks > 1:
            raise _failed(bad[0], "; and so are all samples of its batch, and with several ranks none can be left out")

    def _count(self, bad: Sequence[Failure]) -> None:
        if bad and not self._warned:
            self._warned = True
            warnings.warn(
                f"loader: {bad[0].what}: {bad[0].error}; it is left out, and others will be without another word: "
                "loader.skipped counts them",
                stacklevel=3,
            )
        self.skipped += len(bad)


def _differences(source: Source, state: Mapping[str, Any]) -> list[str]:
    counters = ["epoch", "skipped", *source.start]
    facts = source.facts
    wrong = [f"{name}: missing" for name in [*counters, *facts] if name not in state]
    wrong += [f"{name}: unexpected" for name in state if name not in {*counters, *facts, *source.optional}]
    wrong += [
        f"{name}: found {state[name]!r}, needs a whole number of at least 0"
        for name in counters
        if name in state and not _is_count(state[name])
    ]
    wrong += [
        f"{name}: found {state[name]!r}, this loader has {value!r}"
        for name, value in facts.items()
        if name in state and state[name] != value
    ]
    outside = None if wrong else source.check({name: state[name] for name in source.start})
    return wrong + ([outside] if outside else [])


def _failed(failure: Failure, hint: str) -> DataError:
    return failure.to_error(hint)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
