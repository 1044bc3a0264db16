"""Agree with the other ranks on signals, and compare batches with them, after every step and without waiting."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Callable
from typing import Any

from ftrain import tree
from ftrain.errors import BatchError, DataError
from ftrain.parallel.agreement import Agreement
from ftrain.parallel.same_step import digest
from ftrain.step.across_ranks import DIFFERENT_BATCHES, why_not_together
from ftrain.types import PyTree

SAMPLED = 256
"""About the number of elements of each tensor of a batch that are compared, spread over the tensor."""

END_OF_RUN, END_OF_DATA = "at the end of the run", "at the end of its data, of which each rank needs as many batches"
"""Names of the points of a run at which a rank waits until the others end too."""


class StepVotes:
    """Votes after each step, by which all ranks end the run after the same step, and compare their batches.

    The votes of a step are read after the next one, so that ranks rarely wait for each other. If `compares_batches`,
    all ranks must have the same batches: shapes and dtypes are compared after every step, and some elements every
    `log_every` steps, which waits for the device. `received` returns the signal that this rank has received, or None.
    """

    def __init__(
        self,
        agreement: Agreement,
        received: Callable[[], signal.Signals | None],
        *,
        compares_batches: bool,
        log_every: int,
    ) -> None:
        self.agreement, self._received, self._log_every = agreement, received, log_every
        self._compares = compares_batches and not agreement.is_alone
        self._agreed = 0
        self._seen: dict[tuple[tuple[tuple[int, ...], str], ...], tuple[int, str]] = {}
        self._shapes = 0, ""

    def agreed_signal(self) -> signal.Signals | None:
        """Return the signal on which the ranks have agreed, or None; on one rank, the signal that it has received."""
        number = (self._received() or 0) if self.agreement.is_alone else self._agreed
        return signal.Signals(number) if number else None

    def after_step(self, batch: PyTree, step: int) -> bool:
        """Vote, and return whether the run ends: on several ranks one step after the signal.

        Raises a BatchError on every rank if their batches of the previous step differ.
        """
        if self.agreement.is_alone:
            return self._received() is not None
        if not self._agreed:
            shapes = self._shapes_of(batch) if self._compares else (0, "")
            self._vote(shapes[0], self._digest(batch) if step % self._log_every == 0 else 0)
            self._shapes = shapes
        return self._agreed != 0

    def at_end(self, batch: PyTree = None, *, place: str) -> None:
        """Wait for the other ranks, and agree on a signal; compare some elements of the last `batch` if it is not None.

        Errors on other ranks that wait for this one name the `place`. Raises a DataError if the data of this rank has
        ended, and another rank has more.
        """
        self.agreement.note_place(place)
        # Before the vote, in which a rank with more data would not take part, so that this rank would wait for it.
        if place == END_OF_DATA and not self.agreement.is_alone and (why := why_not_together("fit")):
            raise DataError(
                f"fit: the data of this rank has ended, and {why}; every rank needs the same number of batches, as "
                "ft.data.loader(..., rank=, num_ranks=) gives; with steps=, data that has ended begins again"
            )
        if batch is not None and not self.agreement.is_alone and not self._agreed:
            self._vote(self._shapes[0], self._digest(batch))
        self._read(self.agreement.last_vote())
        self._agreed = self._agreed or self.agreement.largest(self._received() or 0)

    def _digest(self, batch: PyTree) -> int:
        return digest(tree.map(_sample, batch)) if self._compares else 0

    def _vote(self, shapes: int, values: int) -> None:
        """Send a vote, and read the votes after the previous step."""
        self._read(self.agreement.vote(self._received() or 0, shapes, -shapes, values, -values))

    def _read(self, largest: list[int]) -> None:
        """Handle the maxima over the ranks of the numbers of a vote; [] if there was no vote."""
        if not largest:
            return
        number, shapes, minus_shapes, values, minus_values = largest
        self._agreed = max(self._agreed, number)
        if shapes != -minus_shapes or values != -minus_values:
            difference = "values" if shapes == -minus_shapes else "shapes or dtypes"
            raise BatchError(
                f"fit: {DIFFERENT_BATCHES}, or pass sharded(batches='rows'). The batch of this rank was "
                f"{self._shapes[1]}; that of another rank has other {difference}"
            )

    def _shapes_of(self, batch: PyTree) -> tuple[int, str]:
        """Return a checksum of the shapes and dtypes of a batch, and their text."""
        shapes = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in tree.leaves(batch) if tree.is_tensor(leaf))
        if shapes not in self._seen:
            text = ", ".join(f"{name} {text}" for name, text in tree.signature(batch).items())
            self._seen[shapes] = zlib.crc32(repr(shapes).encode()), text
        return self._seen[shapes]


def _sample(leaf: Any) -> Any:
    if not tree.is_tensor(leaf):
        return leaf
    flat = leaf.detach().reshape(-1)
    return flat[:: max(flat.shape[0] // SAMPLED, 1)]
