"""An iterator of batches that blocks between turns, so that a loop inside another library can be timed in turns.

A trainer calls its own steps: it cannot be asked for twenty more. But it must wait for its data. Here the data is an
iterator that yields batches until a turn is over, reports the time, and blocks until the next turn begins.

A turn of n steps lasts from the command that starts it until the loop asks for batch n + 1. A loop that fetches one
batch ahead begins and ends each turn one step early, so that n steps are timed as well. No time for starting or
preparing the loop is included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from bench.problems import Batch

RECORDED = 16
"""How many losses are kept; the race compares only the first few."""


class ClosedError(BaseException):
    """The parent wants no more turns. Not an `Exception`, so that no error handling in a trainer catches it."""


class Gate:
    """Yields one batch again and again, and answers the commands of a connection.

    The command ``("run", n)`` starts a turn of n steps, whose end is answered with its seconds. The command
    ``("losses",)`` is answered with the losses of the first steps. Any other command raises a `ClosedError` in the
    loop. `synchronize` waits until the device has done the work of a turn.
    """

    def __init__(self, connection: Connection, batch: Any, synchronize: Callable[[], object] = lambda: None) -> None:
        self._connection, self._batch, self._synchronize = connection, batch, synchronize
        self._steps_left = 0
        self._losses: list[Any] = []
        self._turn_start: float | None = None

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if not self._steps_left:
                self._end_turn_and_wait()
            self._steps_left -= 1
            yield self._batch

    def synchronize_with(self, synchronize: Callable[[], object]) -> None:
        """Set the function that waits until the work of a turn is done."""
        self._synchronize = synchronize

    def record(self, loss: Any) -> None:
        """Keep the loss of a step, if it is one of the first."""
        if len(self._losses) < RECORDED:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def _end_turn_and_wait(self) -> None:
        self._synchronize()
        end = time.perf_counter()
        if self._turn_start is not None:
            self._connection.send(("turn", end - self._turn_start))
        command = self._connection.recv()
        while command[0] == "losses":
            self._connection.send(("losses", [float(loss) for loss in self._losses]))
            command = self._connection.recv()
        if command[0] != "run":
            raise ClosedError
        self._steps_left = command[1]
        self._turn_start = time.perf_counter()
