"""A gate in front of the batches of a loop, so that whoever owns the loop can be timed in turns.

A trainer calls its own steps and cannot be asked for twenty more. It can be made to wait, though: its data is an
iterator that gives batches until the turn is over, then reports and blocks until the next turn. A turn of n steps is
the time from letting the n-th last batch of the turn go to being asked for one more; a loop that fetches a batch
ahead shifts this by one step at both ends, and n steps are timed all the same. Nothing is started or set up within it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from bench.problems import Batch


class ClosedError(BaseException):
    """No more turns; not an `Exception`, so that a loop's own handling of errors lets it through."""


class Gate:
    """Gives the same batch as often as it is told over a connection, and answers with the seconds that took."""

    def __init__(self, connection: Connection, batch: Any, wait: Callable[[], object] = lambda: None) -> None:
        self._connection, self._batch, self._wait = connection, batch, wait
        self._left, self._losses = 0, list[Any]()
        self._start: float | None = None

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if not self._left:
                self._turn()
            self._left -= 1
            yield self._batch

    def wait_with(self, wait: Callable[[], object]) -> None:
        """Wait in this way for the work of a turn to be done, before its time is taken."""
        self._wait = wait

    def record(self, loss: Any) -> None:
        """Take note of a loss, as long as the first ones are compared."""
        if len(self._losses) < 16:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def _turn(self) -> None:
        self._wait()
        end = time.perf_counter()
        if self._start is not None:
            self._connection.send(("turn", end - self._start))
        while (command := self._connection.recv())[0] == "losses":
            self._connection.send(("losses", [float(loss) for loss in self._losses]))
        if command[0] != "run":
            raise ClosedError
        self._left = command[1]
        self._start = time.perf_counter()
