"""What the schedules hold their arguments to."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from numbers import Integral, Real

from ftrain.errors import OptionError
from ftrain.optim.schedules.text import describe


def number(function: str, argument: str, value: object, needed: str = "a finite number") -> float:
    """A finite number as a float.

    Raises:
        OptionError: it is not one; tensors and booleans are not.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise OptionError(f"{function}: {argument} is {value!r}; it must be {needed}.")
    return float(value)


def positive(function: str, argument: str, value: object) -> float:
    """A number greater than 0.

    Raises:
        OptionError: it is not a finite number, or not greater than 0.
    """
    found = number(function, argument, value)
    if found <= 0:
        raise OptionError(f"{function}: {argument} is {describe(found)}; it must be greater than 0.")
    return found


def factor_of_decay(function: str, argument: str, value: object) -> float:
    """A number greater than 0 and at most 1, with which no power overflows.

    Raises:
        OptionError: it is not a finite number, or not in that range.
    """
    found = positive(function, argument, value)
    if found > 1:
        raise OptionError(f"{function}: {argument} is {describe(found)}; it must be at most 1.")
    return found


def count(function: str, argument: str, value: object, least: int = 0) -> int:
    """A whole number as an int.

    Raises:
        OptionError: it is not an integer, or below the least.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{function}: {argument} is {value!r}; it must be an integer of at least {least}.")
    return int(value)


def choice(function: str, argument: str, value: object, choices: Collection[str]) -> str:
    """One of some names.

    Raises:
        OptionError: it is another; the message lists them.
    """
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{function}: {argument} is {value!r}; choices are {', '.join(choices)}.")
    return value


def require_within(function: str, warmup: int, total: int) -> None:
    """Check that a warm-up is over when the schedule is.

    Raises:
        OptionError: it is longer.
    """
    if warmup > total:
        raise OptionError(
            f"{function}: warmup is {warmup} and total is {total}; warmup must not exceed total, "
            "which counts the warm-up too."
        )


def require_sorted(function: str, argument: str, steps: Sequence[int]) -> None:
    """Check that steps do not go back.

    Raises:
        OptionError: a step is smaller than the one before it.
    """
    if any(later < earlier for earlier, later in pairwise(steps)):
        raise OptionError(f"{function}: {argument} is {list(steps)}; it must be sorted, smallest first.")
