"""Checks of the arguments of schedules, which return them converted. Each error names the function and the argument."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import pairwise
from numbers import Integral, Real

from ftrain.errors import OptionError
from ftrain.optim.schedules.call import describe


def number(function: str, argument: str, value: object, needed: str = "a finite number") -> float:
    """Return a finite number as a float.

    Raises:
        OptionError: for anything else, tensors and booleans included.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise OptionError(f"{function}: {argument} is {value!r}; it must be {needed}.")
    return float(value)


def positive(function: str, argument: str, value: object, most: float = math.inf) -> float:
    """Return a number in (0, `most`] as a float.

    Raises:
        OptionError: for anything else.
    """
    checked = number(function, argument, value)
    if not 0 < checked <= most:
        needed = "greater than 0" if checked <= 0 else f"at most {describe(most)}"
        raise OptionError(f"{function}: {argument} is {describe(checked)}; it must be {needed}.")
    return checked


def count(function: str, argument: str, value: object, least: int = 0) -> int:
    """Return an integer of at least `least` as an int.

    Raises:
        OptionError: for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{function}: {argument} is {value!r}; it must be an integer of at least {least}.")
    return int(value)


def choice(function: str, argument: str, value: object, choices: Collection[str]) -> str:
    """Return one of the names in `choices`.

    Raises:
        OptionError: for anything else.
    """
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{function}: {argument} is {value!r}; choices are {', '.join(choices)}.")
    return value


def require_sorted(function: str, argument: str, steps: Iterable[int]) -> None:
    """Check that steps do not decrease.

    Raises:
        OptionError: when they do.
    """
    steps = list(steps)
    if any(later < earlier for earlier, later in pairwise(steps)):
        raise OptionError(f"{function}: {argument} is {steps}; it must be sorted, smallest first.")
