"""Schedules made of schedules."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ftrain.errors import OptionError
from ftrain.optim.schedules.decays import constant
from ftrain.optim.schedules.inputs import count, number, require_sorted
from ftrain.optim.schedules.text import Written, spelled
from ftrain.types import Schedule


@dataclass(frozen=True, repr=False)
class _Chain(Written):
    schedules: tuple[Schedule, ...]
    boundaries: tuple[int, ...]

    def __call__(self, step: int) -> float:
        index = bisect_right(self.boundaries, step)
        return self.schedules[index](step - (0, *self.boundaries)[index])


@dataclass(frozen=True, repr=False)
class _Scaled(Written):
    schedule: Schedule
    factor: float

    def __call__(self, step: int) -> float:
        return self.factor * self.schedule(step)


@dataclass(frozen=True, repr=False)
class _Ahead(Written):
    schedule: Schedule
    steps: int

    def __call__(self, step: int) -> float:
        return self.schedule(step + self.steps)


def schedule_of(function: str, argument: str, value: float | Schedule) -> Schedule:
    """What a function was given as a schedule; a number stands for a constant.

    Raises:
        OptionError: it is neither a finite number nor callable.
    """
    # A class is callable, too: torch's schedulers are classes, of which a step would make one.
    if callable(value) and not isinstance(value, type):
        return value
    return constant(number(function, argument, value, "a finite number, or a function from step to number"))


def chain(schedules: Sequence[float | Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another: number i takes over at ``boundaries[i - 1]`` and counts from there.

    It joins schedules as optax's ``join_schedules`` and torch's ``SequentialLR`` do.

    Args:
        schedules: at least one; a number stands for a constant.
        boundaries: sorted steps of the whole, one fewer than schedules.

    Raises:
        OptionError: the counts do not fit, a boundary is not an integer of at least 0, the boundaries
            are not sorted, or a schedule is neither a number nor callable.

    >>> from ftrain.optim.schedules import cosine, linear
    >>> schedule = chain([linear(0.0, 1.0, 2), 1, cosine(1.0, 100)], [2, 4])
    >>> [schedule(k) for k in (0, 1, 2, 3, 4, 54)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5]
    >>> schedule
    chain([linear(0, 1, 2), constant(1), cosine(1, 100)], [2, 4])
    """
    parts = tuple(schedule_of("chain", f"schedules[{i}]", item) for i, item in enumerate(schedules))
    steps = tuple(count("chain", f"boundaries[{i}]", item) for i, item in enumerate(boundaries))
    if len(parts) != len(steps) + 1:
        raise OptionError(
            f"chain: found {len(parts)} schedules and {len(steps)} boundaries; "
            "needs at least one schedule, and one boundary fewer than schedules."
        )
    require_sorted("chain", "boundaries", steps)
    return _Chain(spelled(chain, schedules=parts, boundaries=steps), parts, steps)


def scale(schedule: float | Schedule, factor: float) -> Schedule:
    """``factor schedule(k)``: one shape for several peaks, or an end given as a share of the peak.

    Raises:
        OptionError: `factor` is not a finite number, or `schedule` neither a number nor callable.

    >>> from ftrain.optim.schedules import cosine
    >>> scale(cosine(1.0, 100, end=0.1), 3e-4)(100) == 3e-4 * 0.1
    True
    """
    part, factor = schedule_of("scale", "schedule", schedule), number("scale", "factor", factor)
    return _Scaled(spelled(scale, schedule=part, factor=factor), part, factor)


def ahead(schedule: Schedule, steps: int = 1) -> Schedule:
    """``schedule(k + steps)``: one step ahead, the first update of a warm-up has a rate that is not 0.

    Raises:
        OptionError: `steps` is not an integer of at least 0, or `schedule` neither a number nor callable.

    >>> from ftrain.optim.schedules import warmup_constant
    >>> [ahead(warmup_constant(1.0, 4))(k) for k in range(4)]
    [0.25, 0.5, 0.75, 1.0]
    """
    part, steps = schedule_of("ahead", "schedule", schedule), count("ahead", "steps", steps)
    return _Ahead(spelled(ahead, schedule=part, steps=steps), part, steps)


def as_schedule(value: float | Schedule) -> Schedule:
    """A number as `constant`; a callable as it is.

    Raises:
        OptionError: `value` is neither, or a number that is not finite.

    >>> from ftrain.optim.schedules import linear
    >>> as_schedule(0.1), as_schedule(linear(1.0, 0.0, 10))
    (constant(0.1), linear(1, 0, 10))
    """
    return schedule_of("as_schedule", "value", value)
