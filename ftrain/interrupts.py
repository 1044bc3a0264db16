"""Signals as a question that a loop asks between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

EXIT = 128
"""A shell's exit code for a process that a signal has ended is this plus the number of the signal."""


@contextmanager
def interruptible(signals: Sequence[signal.Signals]) -> Iterator[Callable[[], signal.Signals | None]]:
    """Context of a function that tells which of some signals has come; a second one of it acts as ever.

    None does outside the main thread, nor where a signal is ignored, as Ctrl-C is in a job of the background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in signals}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    asked: list[signal.Signals] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(number))
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: asked[0] if asked else None
    finally:
        restore()
