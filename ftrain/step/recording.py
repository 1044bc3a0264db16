"""Mark operations that observers of a run compute for themselves, which a recomputation does not repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_aside: ContextVar[bool] = ContextVar("ftrain_aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Context of operations that are not part of the run, so that a recomputation does not expect them."""
    token = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(token)


def is_aside() -> bool:
    """Whether the current operation is not part of the run (see `aside`)."""
    return _aside.get()
