"""Checks of the arguments of schedules: ``(function, argument, value) -> value``, converted.

Each raises an OptionError that names the function, the argument, its value and what it must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from numbers import Integral, Real

from ftrain.errors import OptionError
from ftrain.optim.schedules.call import Check


def number(function: str, argument: str, value: object, needed: str = "a finite number") -> float:
    """Return a finite number as a float. Raises for others, and for tensors and booleans."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        # Not all of a long value, such as the parameters of a model, which torch.optim gets here.
        raise OptionError(f"{function}: {argument} is {value!r:.100}; it must be {needed}.")
    return float(value)


def number_that_is(needed: str, is_allowed: Callable[[float], bool]) -> Check:
    """Return the check of a number that must be, for example, ``"at least 0"``. The check raises for others."""

    def check(function: str, argument: str, value: object) -> float:
        checked = number(function, argument, value)
        if not is_allowed(checked):
            raise OptionError(f"{function}: {argument} is {value!r}; it must be {needed}.")
        return checked

    return check


positive = number_that_is("greater than 0", lambda value: value > 0)
not_negative = number_that_is("at least 0", lambda value: value >= 0)
fraction = number_that_is("greater than 0 and at most 1", lambda value: 0 < value <= 1)


def count(function: str, argument: str, value: object, least: int = 0) -> int:
    """Return an integer of at least `least` as an int. Raises for others."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{function}: {argument} is {value!r}; it must be an integer of at least {least}.")
    return int(value)


count_from_1 = partial(count, least=1)


def flag(function: str, argument: str, value: object) -> bool:
    """Return a bool. Raises for others."""
    if not isinstance(value, bool):
        raise OptionError(f"{function}: {argument} is {value!r}; it must be True or False.")
    return value


def one_of(*choices: str) -> Check:
    """Return the check of a string with a few possible values. The check raises for others."""

    def check(function: str, argument: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise OptionError(f"{function}: {argument} is {value!r}; choices are {', '.join(choices)}.")
        return value

    return check


def require_sorted(function: str, argument: str, steps: Sequence[int]) -> None:
    """Check that steps do not decrease. Raises when they do."""
    if any(later < earlier for earlier, later in pairwise(steps)):
        raise OptionError(f"{function}: {argument} is {list(steps)}; it must be sorted, smallest first.")
