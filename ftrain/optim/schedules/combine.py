"""Combine schedules: one after another, scaled, or shifted in time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from ftrain.errors import OptionError, whole_number
from ftrain.optim.schedules.call import RETURNS_SCHEDULE, describe, schedule
from ftrain.optim.schedules.checks import number, require_sorted
from ftrain.optim.schedules.warmup_and_decay import constant
from ftrain.types import Schedule


def schedule_of(function: str, argument: str, value: float | Schedule) -> Schedule:
    """Return a number as `constant`, and a callable unchanged; a check, in the form of `ftrain.optim.schedules.checks`.

    Raises an OptionError for other values, for classes and for functions that return schedules.
    """
    # A class is callable too: torch's schedulers are classes, and calling one with a step would make an instance.
    if callable(value) and not isinstance(value, type):
        if getattr(value, RETURNS_SCHEDULE, False):
            name = describe(value)
            raise OptionError(f"{function}: {argument} is the function {name} itself; needs a call, {name}(...).")
        return value
    return constant(number(function, argument, value, "a finite number, or a function from step to number"))


def as_schedule(value: float | Schedule) -> Schedule:
    """Return a number as `constant`, and a callable unchanged. Raises an OptionError for anything else."""
    return schedule_of("as_schedule", "value", value)


def _as_list(function: str, argument: str, values: Any) -> list[Any]:
    if not isinstance(values, Iterable):
        raise OptionError(f"{function}: {argument} is {values!r}, needs a list of {argument}")
    return list(values)


def _schedules(function: str, argument: str, values: Sequence[float | Schedule]) -> list[Schedule]:
    values = _as_list(function, argument, values)
    return [schedule_of(function, f"{argument}[{i}]", value) for i, value in enumerate(values)]


def _boundaries(function: str, argument: str, values: Sequence[int]) -> list[int]:
    values = _as_list(function, argument, values)
    steps = [whole_number(function, f"{argument}[{i}]", step) for i, step in enumerate(values)]
    require_sorted(function, argument, steps)
    return steps


@schedule(schedules=_schedules, boundaries=_boundaries)
def chain(schedules: Sequence[float | Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another: ``schedules[i]`` starts at ``boundaries[i - 1]`` and counts from there.

    The same as optax's ``join_schedules`` and torch's ``SequentialLR``.

    Args:
        schedules: schedules, at least one; a number is a constant.
        boundaries: sorted steps.

    Raises:
        OptionError: there is not exactly one boundary fewer than schedules.

    >>> from ftrain.optim.schedules import cosine, linear
    >>> chain([linear(0.0, 1.0, 2), 1, cosine(1.0, 100)], [2, 4])
    chain([linear(0, 1, 2), constant(1), cosine(1, 100)], [2, 4])
    """
    if len(schedules) != len(boundaries) + 1:
        raise OptionError(
            f"chain: found {len(schedules)} schedules and {len(boundaries)} boundaries; "
            "needs at least one schedule, and one boundary fewer than schedules."
        )
    callables = [as_schedule(schedule) for schedule in schedules]
    starts = [0, *boundaries]

    def value(step: int) -> float:
        index = bisect_right(boundaries, step)
        return callables[index](step - starts[index])

    return value


@schedule(schedule=schedule_of, factor=number)
def scale(schedule: float | Schedule, factor: float) -> Schedule:
    """``factor schedule(k)``: one shape for several peaks, or an end as a share of the peak."""
    scaled = as_schedule(schedule)
    return lambda k: factor * scaled(k)


@schedule(schedule=schedule_of, steps=whole_number)
def ahead(schedule: Schedule, steps: int = 1) -> Schedule:
    """``schedule(k + steps)``. One step ahead, the first update of a warm-up has a rate that is not 0."""
    return lambda k: schedule(k + steps)
