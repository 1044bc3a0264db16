"""Checks of constants that a function was given."""

from __future__ import annotations

from typing import Any, SupportsIndex

from ftrain.errors import ComposeError, OptionError


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


def require_order(function: str, step: Any, state: Any, needed: str) -> None:
    """Check that a step does not stand where the state does, and is no class.

    Raises:
        ComposeError: naming the function, what was found and `needed`, how it is called.
    """
    if not callable(step) and callable(state):
        raise ComposeError(f"{function}: the step and the state are swapped; needs {needed}")
    if isinstance(step, type):
        raise ComposeError(f"{function}: the step is the class {step.__name__}; needs an instance of it: {needed}")


def require_callable(function: str, step: Any, state: Any, needed: str) -> None:
    """Check that a step can be called with a state and a batch, as far as can be told without doing so.

    Raises:
        ComposeError: as `require_order`, and for what cannot be called.
    """
    require_order(function, step, state, needed)
    if not callable(step):
        raise ComposeError(f"{function}: the step is {type(step).__name__}; needs a Step or a function (state, batch)")
