"""Work beside the run that is recorded: what observers compute for themselves, which no recomputation repeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_aside: ContextVar[bool] = ContextVar("ftrain_aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Let a run compute what is not part of it, and what no other run will do again."""
    token = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(token)


def is_aside() -> bool:
    """Whether what runs now is not part of the run."""
    return _aside.get()
