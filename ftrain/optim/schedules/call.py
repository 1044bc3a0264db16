"""A schedule is the call of a function: it prints, compares, hashes and pickles as that call."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ParamSpec, TypeAlias

from ftrain.errors import OptionError
from ftrain.types import Schedule

P = ParamSpec("P")

Check: TypeAlias = Callable[[str, str, Any], Any]
"""``(function, argument, value) -> value``, checked and converted; errors name the function and the argument."""

RETURNS_SCHEDULE = "returns_schedule"
"""Attribute of functions that return schedules, but are not schedules themselves."""


def schedule(**checks: Check) -> Callable[[Callable[P, Schedule]], Callable[P, Schedule]]:
    """Decorate a function that returns schedules: check its arguments, and return a `Call`.

    `checks` are those of each argument (`ftrain.optim.schedules.checks`). None is accepted where it is the default.
    """

    def decorate(function: Callable[P, Schedule]) -> Callable[P, Schedule]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Schedule:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments: dict[str, Any] = bound.arguments
            for name, value in arguments.items():
                if value is not None or signature.parameters[name].default is not None:
                    arguments[name] = checks[name](function.__name__, name, value)
            return Call(call, arguments, function(**arguments))  # type: ignore[call-arg]

        setattr(call, RETURNS_SCHEDULE, True)
        return call

    return decorate


@dataclass(frozen=True, repr=False)
class Call:
    """The schedule that ``function(**arguments)`` returns: step -> value. A negative step counts as 0."""

    function: Callable[..., Schedule]
    arguments: Mapping[str, Any]
    value: Schedule = field(compare=False)

    def __call__(self, step: int) -> float:
        """Return the value at a step of the optimizer, counted from 0."""
        return self.value(max(step, 0))

    def __hash__(self) -> int:
        return hash(repr(self))

    def __reduce__(self) -> tuple[Callable[[], Schedule], tuple[()]]:
        return functools.partial(self.function, **self.arguments), ()

    def __repr__(self) -> str:
        """Required arguments by position, and the others by name where they differ from their default."""
        texts = []
        for name, parameter in inspect.signature(self.function).parameters.items():
            value = self.arguments[name]
            if parameter.default is parameter.empty:
                texts.append(_text(value))
            elif value != parameter.default:
                texts.append(f"{name}={_text(value)}")
        return f"{self.function.__name__}({', '.join(texts)})"


def is_told_by_text(schedule: Any) -> bool:
    """Whether the text of a schedule tells its values: it is a `Call`, and has no function of a user in it."""
    if not isinstance(schedule, Call):
        return not callable(schedule)
    values = (value if isinstance(value, list) else [value] for value in schedule.arguments.values())
    return all(map(is_told_by_text, itertools.chain.from_iterable(values)))


def require_number(name: str, schedule: Schedule, value: Any, step: int) -> None:
    """Check what a schedule returned at a step. Raises an OptionError with its `name` if it is no number."""
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        returned = f"the schedule of {name}, {describe(schedule)}, returned a {type(value).__name__} at step {step}"
        raise OptionError(f"Step: {returned}; it must return a number.") from error


def describe(value: float | Schedule) -> str:
    """Return a number as its shortest text that loses no digit, and a schedule as its call.

    >>> describe(0.0003), describe(0.1), describe(1.0), describe(abs)
    ('3e-4', '0.1', '1', 'abs')
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
