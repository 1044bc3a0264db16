"""Positions: where a source of batches stands, in the words of whatever keeps it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ftrain.errors import DataError

PROTOCOLS = ("state_dict", "load_state_dict"), ("get_state", "set_state")
"""What a source may call reading its position and setting it."""


def has_position(data: Any) -> bool:
    """Whether a source keeps its position."""
    return _methods(data) is not None


def position(data: Any) -> dict[str, Any] | None:
    """Return where a source stands, as its ``state_dict()`` or ``get_state()`` says; None where it has neither.

    A copy, so that it stays what it is when the source goes on.

    >>> position([1, 2, 3])
    """
    methods = _methods(data)
    return None if methods is None else copy.deepcopy(getattr(data, methods[0])())


def seek(data: Any, position: Mapping[str, Any]) -> None:
    """Set where a source stands, from what `position` returned: its next pass continues there.

    Raises:
        DataError: when the source has no ``load_state_dict`` and no ``set_state``.
    """
    methods = _methods(data)
    if methods is None:
        raise DataError(
            f"seek: {type(data).__name__} has neither load_state_dict nor set_state; needs a source that keeps its "
            "position, such as ft.data.loader(...) or torchdata's StatefulDataLoader"
        )
    getattr(data, methods[1])(copy.deepcopy(dict(position)))


def _methods(data: Any) -> tuple[str, str] | None:
    found = (pair for pair in PROTOCOLS if all(callable(getattr(data, name, None)) for name in pair))
    return next(found, None)
