"""Schedules as calls of functions: a schedule prints, compares, hashes and pickles as its call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ParamSpec, TypeAlias

from ftrain.errors import ComposeError, OptionError, require_range
from ftrain.types import Schedule

P = ParamSpec("P")

Check: TypeAlias = Callable[[str, str, Any], Any]
"""``(function, argument, value) -> value``, checked and converted; errors name the function and the argument."""

RETURNS_SCHEDULE = "returns_schedule"
"""Attribute of functions that return schedules, but are not schedules themselves."""


def schedule(**checks: Check) -> Callable[[Callable[P, Schedule]], Callable[P, Schedule]]:
    """Return a decorator for a function that returns schedules: its arguments are checked, and it returns a `Call`.

    `checks` has the check of each argument (`ftrain.optim.schedules.checks`). None is accepted where it is the default.
    Raises a ComposeError, from the function, if arguments are missing or unknown.
    """

    def decorate(function: Callable[P, Schedule]) -> Callable[P, Schedule]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Schedule:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:  # of the signature, which does not name the function
                name, parameters = function.__name__, ", ".join(signature.parameters)
                raise ComposeError(f"{name}: {error}; its arguments are {parameters}") from None
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
        """Return the call as text: required arguments by position, others by name if they differ from their default."""
        texts = []
        for name, parameter in inspect.signature(self.function).parameters.items():
            value = self.arguments[name]
            if parameter.default is parameter.empty:
                texts.append(_text(value))
            elif value != parameter.default:
                texts.append(f"{name}={_text(value)}")
        return f"{self.function.__name__}({', '.join(texts)})"


def text_defines_values(schedule: Any) -> bool:
    """Whether schedules with equal texts have equal values: it is a `Call` without a function of a user in it."""
    if isinstance(schedule, list):
        return all(map(text_defines_values, schedule))
    if isinstance(schedule, Call):
        return all(map(text_defines_values, schedule.arguments.values()))
    return not callable(schedule)


def require_number(name: str, schedule: Schedule, value: Any, step: int) -> None:
    """Raises an OptionError with the `name` of a schedule if the `value` that it returned at a step is not a number."""
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        returned = f"the schedule of {name}, {describe(schedule)}, returned a {type(value).__name__} at step {step}"
        raise OptionError(f"Step: {returned}; it must return a number.") from error


def bounded(function: str, name: str, schedule: Schedule, high: float = float("inf")) -> Schedule:
    """Return a schedule whose values are checked: an OptionError, from the step, names one that is not in [0, high]."""

    def checked(step: int) -> float:
        value = schedule(step)
        require_number(name, schedule, value, step)
        return require_range(function, f"{name} at step {step}", float(value), 0.0, high, closed=True)

    return checked


def describe(value: float | Schedule) -> str:
    """Return the text of a number, the shortest that loses no digit, or of a schedule, its call.

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
