"""Checks of the arguments of schedules: ``(function, argument, value) -> converted value``.

Like the checks in `ftrain.errors`, each raises an OptionError that names the function, the argument, its value and what
it must be.
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
    """Return a finite number as a float. Raises an OptionError for any other value, such as a tensor or a bool."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        # Only the start of a long value: users of torch.optim pass the parameters of a model as the first argument.
        raise OptionError(f"{function}: {argument} is {value!r:.100}, needs {needed}")
    return float(value)


def number_that_is(needed: str, is_allowed: Callable[[float], bool]) -> Check:
    """Return the check of a number for which `is_allowed` must be true.

    `needed` is the condition as text, such as ``"in (0, 1)"``. Raises an OptionError,
    from the check, for other numbers.
    """

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
    """Return a bool. Raises an OptionError for any other value."""
    if not isinstance(value, bool):
        raise OptionError(f"{function}: {argument} is {value!r}, needs True or False")
    return value


def one_of(*choices: str) -> Check:
    """Return the check of a string that must be one of `choices`."""
    return partial(require_choice, choices=choices)


def require_sorted(function: str, argument: str, steps: Sequence[int]) -> None:
    """Raises an OptionError if a step is smaller than the one before it."""
    if any(later < earlier for earlier, later in pairwise(steps)):
        raise OptionError(f"{function}: {argument} is {list(steps)}, needs steps that are sorted, smallest first")
