"""Log when a compilation takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ftrain.errors import log_on_first_rank

SLOW = 5.0
"""Seconds after which a compilation is logged."""

LOGGER = "ftrain.compiling"


@contextmanager
def log_if_slow(name: str) -> Iterator[None]:
    """Log that the graph of a function is being compiled, if it takes longer than `SLOW`; log the end too.

    It is a warning of the logger ``ftrain.compiling``: warnings are shown without any settings.
    """
    start, since = time.monotonic(), time.strftime("%H:%M:%S")

    def log_start() -> None:
        log_on_first_rank("compiled: compiling the graph of %s, since %s", name, since, logger=LOGGER)

    timer = threading.Timer(SLOW, log_start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.monotonic() - start
    if seconds > SLOW:
        log_on_first_rank("compiled: the graph of %s took %.0f s to compile", name, seconds, logger=LOGGER)
