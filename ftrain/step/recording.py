"""Mark operations that observers of a run compute for themselves, which a recomputation does not repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_unrecorded: ContextVar[bool] = ContextVar("ftrain_unrecorded", default=False)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context of operations that are not part of the run, so that a recomputation does not expect them."""
    token = _unrecorded.set(True)
    try:
        yield
    finally:
        _unrecorded.reset(token)


def is_unrecorded() -> bool:
    """Whether the current operation is not part of the run (see `unrecorded`)."""
    return _unrecorded.get()
