"""Checks of the arguments of schedules: ``(function, argument, value) -> value``, converted.

Each raises an OptionError that names the function and the argument if the value is not of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise
from numbers import Integral, Real

from ftrain.errors import OptionError
from ftrain.optim.schedules.call import Check, describe


def number(function: str, argument: str, value: object, needed: str = "a finite number") -> float:
    """Return a finite number as a float. Raises for anything else, tensors and booleans included."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise OptionError(f"{function}: {argument} is {value!r}; it must be {needed}.")
    return float(value)


def positive(function: str, argument: str, value: object, most: float = math.inf) -> float:
    """Return a number in (0, `most`] as a float. Raises for anything else."""
    checked = number(function, argument, value)
    if not 0 < checked <= most:
        needed = "greater than 0" if checked <= 0 else f"at most {describe(most)}"
        raise OptionError(f"{function}: {argument} is {describe(checked)}; it must be {needed}.")
    return checked


def count(function: str, argument: str, value: object, least: int = 0) -> int:
    """Return an integer of at least `least` as an int. Raises for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{function}: {argument} is {value!r}; it must be an integer of at least {least}.")
    return int(value)


count_from_1 = partial(count, least=1)


def flag(function: str, argument: str, value: object) -> bool:
    """Return a bool. Raises for anything else."""
    if not isinstance(value, bool):
        raise OptionError(f"{function}: {argument} is {value!r}; it must be True or False.")
    return value


def one_of(choices: Collection[str]) -> Check:
    """Return a check for one of these names. Raises, when it is called, for anything else."""

    def check(function: str, argument: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise OptionError(f"{function}: {argument} is {value!r}; choices are {', '.join(choices)}.")
        return value

    return check


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda function, argument, value: None if value is None else check(function, argument, value)


def require_sorted(function: str, argument: str, steps: Sequence[int]) -> None:
    """Check that steps do not decrease. Raises when they do."""
    if any(later < earlier for earlier, later in pairwise(steps)):
        raise OptionError(f"{function}: {argument} is {list(steps)}; it must be sorted, smallest first.")
