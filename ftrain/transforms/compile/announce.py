"""Log when a compilation takes long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ftrain.errors import OptionError
from ftrain.step.blocks import find_blocks
from ftrain.types import Loss

SLOW = 5.0
"""Seconds of compiling that pass without a line."""

log = logging.getLogger("ftrain.compiling")


@contextmanager
def log_if_slow(what: str) -> Iterator[None]:
    """Say that something is being compiled, and since when, if it takes longer than `SLOW`; and when it is done.

    A warning of the logger ``ftrain.compiling``, since warnings are what is shown without any settings.
    """
    is_announced, began, since = threading.Event(), time.monotonic(), time.strftime("%H:%M:%S")

    def say() -> None:
        is_announced.set()
        log.warning("compiled: compiling %s, since %s", what, since)

    timer = threading.Timer(SLOW, say)
    timer.daemon = True
    with suppress(RuntimeError):  # Where there can be no more threads, there is no line.
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if is_announced.is_set():
        log.warning("compiled: %s took %.0f s to compile", what, time.monotonic() - began)


def described(loss: Loss) -> str:
    """How a line calls a step, by its loss.

    >>> described(Loss(lambda params, batch: None, "squares"))
    'the step (squares)'
    """
    if loss.module is None:
        return f"the step ({loss.text})"
    name = type(loss.module).__name__
    with suppress(OptionError):
        return f"the step ({name}, {len(find_blocks(loss.module, None))} blocks)"
    return f"the step ({name})"
