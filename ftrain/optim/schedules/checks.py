"""Checks of the arguments of schedules: ``(function, argument, value) -> value``, converted.

Each raises an OptionError that names the function, the argument, its value and what it must be, as those of
`ftrain.errors` do, which are used too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from numbers import Real

from ftrain.errors import OptionError, require_choice, require_range, whole_number
from ftrain.optim.schedules.call import Check


def number(function: str, argument: str, value: object, needed: str = "a finite number") -> float:
    """Return a finite number as a float. Raises for others, and for tensors and booleans."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        # Not all of a long value, such as the parameters of a model, which torch.optim gets here.
        raise OptionError(f"{function}: {argument} is {value!r:.100}, needs {needed}")
    return float(value)


def number_that_is(needed: str, is_allowed: Callable[[float], bool]) -> Check:
    """Return the check of a number that must be, for example, ``"in (0, 1)"``. The check raises for others."""

    def check(function: str, argument: str, value: object) -> float:
        checked = number(function, argument, value)
        if not is_allowed(checked):
            raise OptionError(f"{function}: {argument} is {value!r}, needs a number {needed}")
        return checked

    return check


not_negative = partial(require_range, low=0.0)
fraction = number_that_is("greater than 0 and at most 1", lambda value: 0 < value <= 1)
count_from_1 = partial(whole_number, least=1)


def flag(function: str, argument: str, value: object) -> bool:
    """Return a bool. Raises for others."""
    if not isinstance(value, bool):
        raise OptionError(f"{function}: {argument} is {value!r}, needs True or False")
    return value


def one_of(*choices: str) -> Check:
    """Return the check of a string with a few possible values. The check raises for others."""
    return partial(require_choice, choices=choices)


def require_sorted(function: str, argument: str, steps: Sequence[int]) -> None:
    """Check that steps do not decrease. Raises when they do."""
    if any(later < earlier for earlier, later in pairwise(steps)):
        raise OptionError(f"{function}: {argument} is {list(steps)}, needs steps that are sorted, smallest first")
