"""Log when a compilation takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ftrain.errors import log_on_first_rank

SLOW = 5.0
"""Seconds after which a compilation is logged."""

LOGGER = "ftrain.compiling"


@contextmanager
def log_if_slow(name: str) -> Iterator[None]:
    """Log that the graph of a function is being compiled, if it takes longer than `SLOW`; log the end too.

    It is a warning of the logger ``ftrain.compiling``: warnings are shown without any settings.
    """
    is_logged, start, since = threading.Event(), time.monotonic(), time.strftime("%H:%M:%S")

    def log_start() -> None:
        is_logged.set()
        log_on_first_rank("compiled: compiling the graph of %s, since %s", name, since, logger=LOGGER)

    timer = threading.Timer(SLOW, log_start)
    timer.daemon = True
    with suppress(RuntimeError):  # If no thread can be started, nothing is logged.
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if is_logged.is_set():
        log_on_first_rank(
            "compiled: the graph of %s took %.0f s to compile", name, time.monotonic() - start, logger=LOGGER
        )
