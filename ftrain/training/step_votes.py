"""Send signals and checksums of batches to the other ranks after every step, without waiting."""

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
"""About how many elements of each tensor of a batch are compared, spread over all of it."""

END_OF_RUN, END_OF_DATA = "at the end of the run", "at the end of its data, of which each rank needs as many batches"
"""Where a rank is that waits for the others to end too."""


class StepVotes:
    """The signal after which all ranks end the run, at the same step; and a check that they have the same batches.

    The votes after a step are read after the next one, so that ranks rarely wait for each other. If `compares_batches`,
    all ranks must have the same batches: the shapes and dtypes of each are compared, and every `log_every` steps some
    elements, which waits for the device. `received` returns the signal that this rank has received.
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

        Raises a BatchError on every rank when their batches of the previous step differ.
        """
        if self.agreement.is_alone:
            return self._received() is not None
        if not self._agreed:
            shapes = self._shapes_of(batch) if self._compares else (0, "")
            self._vote(shapes[0], self._digest(batch) if step % self._log_every == 0 else 0)
            self._shapes = shapes
        return self._agreed != 0

    def at_end(self, batch: PyTree = None, *, place: str) -> None:
        """Wait for the other ranks, and agree; compare some elements of `batch`, the last one, if it is not None.

        The `place` says where this rank is to those that wait for it. Raises a DataError if the data has ended, and
        another rank has more of it.
        """
        self.agreement.note_place(place)
        # Before the vote: it would be one more that the others do not take part in, and this rank would wait for them.
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
        """Read the largest number of all ranks for each number of a vote; [] if there was no vote."""
        if not largest:
            return
        number, shapes, minus_shapes, values, minus_values = largest
        self._agreed = max(self._agreed, number)
        if shapes != -minus_shapes or values != -minus_values:
            what = "values" if shapes == -minus_shapes else "shapes or dtypes"
            raise BatchError(
                f"fit: {DIFFERENT_BATCHES}, or pass sharded(batches='rows'). The batch of this rank was "
                f"{self._shapes[1]}; that of another rank has other {what}"
            )

    def _shapes_of(self, batch: PyTree) -> tuple[int, str]:
        """Return a checksum of the shapes and dtypes of a batch, and these as text."""
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
