"""Signals as a question that a loop asks between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

EXIT = 128
"""A shell's exit code for a process that a signal has ended is this plus the number of the signal."""


class Abandoned(BaseException):
    """A signal has come in the middle of a step that has changed nothing yet, and takes long: it was not finished."""


class interruptible:  # noqa: N801
    """Context of a function that tells which of some signals has come; a second one of it acts as ever.

    None does outside the main thread, nor where a signal is ignored, as Ctrl-C is in a job of the background.

    Args:
        signals: which ones.
        abandons: whether what runs in a frame of the interpreter can be abandoned: a signal raises `Abandoned` there.
    """

    # No generator: contextlib writes to the errors that pass through one, which frozen dataclasses refuse.
    def __init__(
        self, signals: Sequence[signal.Signals], abandons: Callable[[FrameType | None], bool] = lambda frame: False
    ) -> None:
        self._abandons = abandons
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._before: dict[signal.Signals, Any] = {}
        self._asked: list[signal.Signals] = []

    def __enter__(self) -> Callable[[], signal.Signals | None]:
        before = {number: signal.getsignal(number) for number in self._signals}
        self._before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._ask)
        return lambda: self._asked[0] if self._asked else None

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(signal.Signals(number))
        self._restore()
        if self._abandons(frame):
            raise Abandoned

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
