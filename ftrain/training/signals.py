"""Signals that end a run after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

EXIT_CODE_BASE = 128
"""The exit code of a process that a signal has ended is this plus the number of the signal, as shells report it."""


class Abandoned(BaseException):
    """A signal came while a step was being compiled, which may take minutes. The step has changed nothing."""


class interruptible:  # noqa: N801
    """Context that records a signal instead of acting on it; a second signal acts as outside of the context.

    ``with`` returns a function that returns the received signal, or None. Signals that are ignored stay ignored, as
    Ctrl-C is in a background job of a shell. The context does nothing outside the main thread. If
    ``can_abandon(interpreter frame)`` is true when a signal comes, this raises `Abandoned` in that frame.
    """

    # Not a generator: contextlib writes to the errors that pass through one, which frozen dataclasses refuse.
    def __init__(self, signals: Sequence[signal.Signals], can_abandon: Callable[[FrameType | None], bool]) -> None:
        self._can_abandon = can_abandon
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._handlers: dict[signal.Signals, Any] = {}
        self._received: list[signal.Signals] = []

    def __enter__(self) -> Callable[[], signal.Signals | None]:
        handlers = {number: signal.getsignal(number) for number in self._signals}
        self._handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        for number in self._handlers:
            signal.signal(number, self._receive)
        return lambda: self._received[0] if self._received else None

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))
        self._restore()
        if self._can_abandon(frame):
            raise Abandoned

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
