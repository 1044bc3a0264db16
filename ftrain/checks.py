"""Checks of constants that a function was given."""

from __future__ import annotations

from typing import Any, SupportsIndex

from ftrain.errors import OptionError


def require_positive(function: str, name: str, value: Any) -> None:
    """Check for a positive whole number.

    Raises:
        OptionError: naming the function, the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value.__index__() < 1:
        raise OptionError(f"{function}: {name} is {value!r}, needs a whole number of at least 1")


def require_range(function: str, name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Check that a constant lies in [low, high).

    Raises:
        OptionError: naming the function, the argument, its value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
        raise OptionError(f"{function}: {name} is {value!r}, needs a number in [{low:g}, {high:g})")
