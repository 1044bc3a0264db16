"""Log when a compilation takes long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ftrain.types import Loss

SLOW = 5.0
"""Seconds after which a compilation is logged."""

log = logging.getLogger("ftrain.compiling")


@contextmanager
def log_if_slow(what: str) -> Iterator[None]:
    """Log what is being compiled, and since when, if it takes longer than `SLOW`; log its end too.

    It is a warning of the logger ``ftrain.compiling``: warnings are shown without any settings.
    """
    is_logged, start, since = threading.Event(), time.monotonic(), time.strftime("%H:%M:%S")

    def log_start() -> None:
        is_logged.set()
        log.warning("compiled: compiling %s, since %s", what, since)

    timer = threading.Timer(SLOW, log_start)
    timer.daemon = True
    with suppress(RuntimeError):  # If no thread can be started, nothing is logged.
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if is_logged.is_set():
        log.warning("compiled: %s took %.0f s to compile", what, time.monotonic() - start)


def name_of(loss: Loss) -> str:
    """Return how the log names the step of a loss."""
    return f"the step of {loss.name}"
