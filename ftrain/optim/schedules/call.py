"""A schedule is the call of a function: it prints, compares, hashes and pickles as that call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ParamSpec, TypeAlias

from ftrain.errors import OptionError
from ftrain.types import Schedule

P = ParamSpec("P")

Check: TypeAlias = Callable[[str, str, Any], Any]
"""``(function, argument, value) -> value``, checked and converted; errors name the function and the argument."""

MAKES_SCHEDULES = "makes_schedules"
"""Attribute of functions that return schedules, but are not schedules themselves."""


def schedule(**checks: Check) -> Callable[[Callable[P, Schedule]], Callable[P, Schedule]]:
    """Make the schedules that a function returns print, compare and pickle as the call that made them.

    Use it as a decorator: ``@schedule(peak=number, warmup=count)``.

    Args:
        checks: function that checks and converts each argument, by name; see `ftrain.optim.schedules.checks`.
    """

    def decorate(function: Callable[P, Schedule]) -> Callable[P, Schedule]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def make(*args: P.args, **kwargs: P.kwargs) -> Schedule:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = {name: checks[name](function.__name__, name, value) for name, value in bound.arguments.items()}
            return Call(make, arguments, function(**arguments))  # type: ignore[call-arg]

        setattr(make, MAKES_SCHEDULES, True)
        return make

    return decorate


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """The schedule that ``function(**arguments)`` returns.

    Args:
        function: a function of a module, which is found by its name when the schedule is unpickled.
        arguments: all of its arguments, checked.
        value: step -> value, for steps of at least 0. A negative step counts as 0.
    """

    function: Callable[..., Schedule]
    arguments: Mapping[str, Any]
    value: Schedule

    def __call__(self, step: int) -> float:
        """Return the value at a step of the optimizer, counted from 0."""
        return self.value(max(step, 0))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and (self.function, self.arguments) == (other.function, other.arguments)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __reduce__(self) -> tuple[Callable[[], Schedule], tuple[()]]:
        return functools.partial(self.function, **self.arguments), ()

    def __repr__(self) -> str:
        """Required arguments by position, and the others by name where they differ from their default."""
        parts = []
        for name, parameter in inspect.signature(self.function).parameters.items():
            value = self.arguments[name]
            if parameter.default is parameter.empty:
                parts.append(_text(value))
            elif value != parameter.default:
                parts.append(f"{name}={_text(value)}")
        return f"{self.function.__name__}({', '.join(parts)})"


def require_numbers(schedules: Mapping[str, Schedule]) -> None:
    """Check that schedules return numbers, at step 0.

    Raises:
        OptionError: when one does not.
    """
    for name, each in schedules.items():
        value: Any = each(0)
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(
                f"Step.init: the schedule of {name}, {describe(each)}, has returned a {type(value).__name__} at step "
                "0; needs a number"
            ) from error


def describe(value: float | Schedule) -> str:
    """Return a number as its shortest text that loses no digit, and a schedule as its call.

    >>> from ftrain.optim.schedules import warmup_constant
    >>> describe(0.0003), describe(0.1), describe(1.0), describe(warmup_constant(0.001, 5)), describe(abs)
    ('3e-4', '0.1', '1', 'warmup_constant(1e-3, 5)', 'abs')
    """
    if callable(value):
        return str(getattr(value, "__name__", value))
    number = Decimal(repr(float(value))).normalize()
    return format(number, "f" if -3 < number.adjusted() < 6 else "e").replace("e+", "e")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if isinstance(value, int | str) else describe(value)
