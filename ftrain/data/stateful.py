"""Read and set the position of a source of batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ftrain.errors import DataError

PROTOCOLS = ("state_dict", "load_state_dict"), ("get_state", "set_state")
"""Pairs of methods that read and set the position of a source."""


def has_position(data: Any) -> bool:
    """Whether a source has a position that can be saved."""
    return _methods(data) is not None


def position(data: Any) -> dict[str, Any] | None:
    """Return the position of a source: a copy of its ``state_dict()`` or ``get_state()``; None if it has neither.

    >>> position([1, 2, 3])
    """
    methods = _methods(data)
    return None if methods is None else copy.deepcopy(getattr(data, methods[0])())


def start_position(data: Any) -> dict[str, Any] | None:
    """Return the position at which the next pass over a source starts.

    For a `Loader` that is where an unfinished epoch was started, such as one of which only a batch was looked at; for
    other sources the `position`.
    """
    start = getattr(data, "start_dict", None)
    return copy.deepcopy(start()) if callable(start) else position(data)


def seek(data: Any, position: Mapping[str, Any]) -> None:
    """Set a source to a position that `position` returned, from which its next pass continues.

    Raises a DataError if the source has neither ``load_state_dict`` nor ``set_state``.
    """
    methods = _methods(data)
    if methods is None:
        raise DataError(
            f"seek: {type(data).__name__} has neither load_state_dict nor set_state; needs a source that can save its "
            "position, such as ft.data.loader(...) or torchdata's StatefulDataLoader"
        )
    getattr(data, methods[1])(copy.deepcopy(dict(position)))


def _methods(data: Any) -> tuple[str, str] | None:
    """Return the names of the methods that read and set the position of a source; None if it has none."""
    # A loader of Accelerate always has these methods; they work only if the loader in it has them too.
    owners = data, getattr(data, "base_dataloader", data)
    for pair in PROTOCOLS:
        if all(callable(getattr(owner, name, None)) for owner in owners for name in pair):
            return pair
    return None
