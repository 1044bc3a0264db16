"""Schedules: pure functions from the optimizer step, counted from 0, to a value, evaluated on the host.

Values are those of ``transformers.optimization``: a warm-up starts at 0 and reaches the peak at
``k = warmup``; a decay reaches its end at ``k = total`` (which counts the warm-up) and holds it from
there on, where transformers' cosine would rise again.

Two schedules are equal if the same call made them; they pickle, and ``eval(repr(schedule))`` gives
the schedule back.

>>> schedule = warmup_cosine(0.0003, warmup=100, total=2000)
>>> schedule
warmup_cosine(3e-4, 100, 2000)
>>> schedule(0), schedule(50), schedule(100), schedule(2000)
(0.0, 0.00015, 0.0003, 0.0)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from numbers import Integral, Real
from typing import TypeAlias

from ftrain.errors import OptionError
from ftrain.types import Schedule

_Shape: TypeAlias = Callable[[int, int], float]
"""From the steps done, of how many, to the share of the way still to go: from 1 to 0."""


@dataclass(frozen=True)
class _Power:
    power: float = 1.0

    def __call__(self, done: int, steps: int) -> float:
        return float(((steps - done) / steps) ** self.power)


def _half_cosine(done: int, steps: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * (done / steps)))


@dataclass(frozen=True, repr=False)
class _Curve:
    """From 0 up to `peak` in `warmup` steps, then to `end` at `total` along `shape`."""

    text: str
    peak: float
    end: float
    warmup: int = 0
    total: int = 0
    shape: _Shape = _Power()

    def __call__(self, step: int) -> float:
        done, steps = max(step, 0) - self.warmup, self.total - self.warmup
        if done < 0:
            return self.peak * (max(step, 0) / self.warmup)
        if done == 0:
            return self.peak
        if done >= steps:
            return self.end
        return self.end + (self.peak - self.end) * self.shape(done, steps)

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class _Chain:
    schedules: tuple[Schedule, ...]
    boundaries: tuple[int, ...]

    def __call__(self, step: int) -> float:
        index = bisect_right(self.boundaries, step)
        return self.schedules[index](step - (0, *self.boundaries)[index])

    def __repr__(self) -> str:
        return f"chain([{', '.join(map(describe, self.schedules))}], {list(self.boundaries)})"


def constant(value: float) -> Schedule:
    """The same value at every step.

    Raises:
        OptionError: `value` is not a finite number.

    >>> constant(0.1)(1000)
    0.1
    """
    value = _number("constant", "value", value)
    return _Curve(f"constant({describe(value)})", value, value)


def linear(start: float, end: float, steps: int) -> Schedule:
    """``start + (end - start) k / steps``, then `end`.

    Raises:
        OptionError: `start` or `end` is not a finite number, or `steps` not an integer of at least 0.

    >>> [linear(1.0, 0.0, 4)(k) for k in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    start, end = _number("linear", "start", start), _number("linear", "end", end)
    steps = _count("linear", "steps", steps)
    return _Curve(f"linear({describe(start)}, {describe(end)}, {steps})", start, end, total=steps)


def cosine(peak: float, total: int, end: float = 0.0) -> Schedule:
    """``end + (peak - end) (1 + cos(pi k / total)) / 2``, then `end`.

    Raises:
        OptionError: a value is not a finite number, or `total` not an integer of at least 0.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, equation 5.

    >>> [round(cosine(1.0, 4)(k), 3) for k in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return _decay("cosine", _half_cosine, peak, (total,), end)


def polynomial(peak: float, total: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """``end + (peak - end) (1 - k / total)^power``, then `end`.

    Raises:
        OptionError: a value is not a finite number, `power` is not positive, or `total` is not an
            integer of at least 0.

    >>> [polynomial(1.0, 4, power=2)(k) for k in range(6)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    return _decay("polynomial", _power("polynomial", power), peak, (total,), end)


def warmup_constant(peak: float, warmup: int) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then `peak`.

    Raises:
        OptionError: `peak` is not a finite number, or `warmup` not an integer of at least 0.

    >>> [warmup_constant(1.0, 2)(k) for k in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    peak, warmup = _number("warmup_constant", "peak", peak), _count("warmup_constant", "warmup", warmup)
    return _Curve(f"warmup_constant({describe(peak)}, {warmup})", peak, peak, warmup, warmup)


def warmup_linear(peak: float, warmup: int, total: int, end: float = 0.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then as `linear` from `peak` to `end`, reached at `total`.

    Raises:
        OptionError: a value is not a finite number, or not ``0 <= warmup <= total`` in integers.

    >>> [warmup_linear(1.0, 2, 4)(k) for k in range(6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    return _decay("warmup_linear", _Power(), peak, (warmup, total), end)


def warmup_cosine(peak: float, warmup: int, total: int, end: float = 0.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then as `cosine` from `peak` to `end`, reached at `total`.

    Raises:
        OptionError: a value is not a finite number, or not ``0 <= warmup <= total`` in integers.

    >>> warmup_cosine(1e-3, 10, 100, end=1e-5)
    warmup_cosine(1e-3, 10, 100, end=1e-5)
    """
    return _decay("warmup_cosine", _half_cosine, peak, (warmup, total), end)


def warmup_polynomial(peak: float, warmup: int, total: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then as `polynomial` from `peak` to `end`, reached at `total`.

    Raises:
        OptionError: a value is not a finite number, `power` is not positive, or not
            ``0 <= warmup <= total`` in integers.

    >>> [warmup_polynomial(1.0, 2, 4, power=2)(k) for k in range(6)]
    [0.0, 0.5, 1.0, 0.25, 0.0, 0.0]
    """
    return _decay("warmup_polynomial", _power("warmup_polynomial", power), peak, (warmup, total), end)


def chain(schedules: Sequence[float | Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another: number i takes over at ``boundaries[i - 1]`` and counts from there.

    Args:
        schedules: at least one; a number stands for a constant.
        boundaries: sorted steps, one fewer than schedules.

    Raises:
        OptionError: the counts do not fit, a boundary is not an integer of at least 0, the boundaries
            are not sorted, or a schedule is neither a number nor callable.

    >>> schedule = chain([linear(0.0, 1.0, 2), 1, cosine(1.0, 100)], [2, 4])
    >>> [schedule(k) for k in (0, 1, 2, 3, 4, 54)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5]
    >>> schedule
    chain([linear(0, 1, 2), constant(1), cosine(1, 100)], [2, 4])
    """
    parts = tuple(_schedule("chain", f"schedules[{i}]", item) for i, item in enumerate(schedules))
    steps = tuple(_count("chain", f"boundaries[{i}]", item) for i, item in enumerate(boundaries))
    if len(parts) != len(steps) + 1:
        raise OptionError(
            f"chain: found {len(parts)} schedules and {len(steps)} boundaries; "
            "needs at least one schedule, and one boundary fewer than schedules."
        )
    if any(later < earlier for earlier, later in pairwise(steps)):
        raise OptionError(f"chain: boundaries is {list(steps)}; it must be sorted, smallest first.")
    return _Chain(parts, steps)


def as_schedule(value: float | Schedule) -> Schedule:
    """A number as `constant`; a callable as it is.

    Raises:
        OptionError: `value` is neither, or a number that is not finite.

    >>> as_schedule(0.1), as_schedule(linear(1.0, 0.0, 10))
    (constant(0.1), linear(1, 0, 10))
    """
    return _schedule("as_schedule", "value", value)


def describe(value: float | Schedule) -> str:
    """How a number or a schedule prints in a pipeline: short, with every digit that counts.

    >>> describe(0.0003), describe(0.1), describe(1.0), describe(warmup_constant(0.001, 5)), describe(abs)
    ('3e-4', '0.1', '1', 'warmup_constant(1e-3, 5)', 'abs')
    """
    if callable(value):
        return str(getattr(value, "__name__", value))
    number = Decimal(repr(float(value))).normalize()
    return format(number, "f" if -3 < number.adjusted() < 6 else "e").replace("e+", "e")


def _decay(function: str, shape: _Shape, peak: float, counts: tuple[int, ...], end: float) -> Schedule:
    peak, end = _number(function, "peak", peak), _number(function, "end", end)
    names = ("warmup", "total")[-len(counts) :]
    counts = tuple(_count(function, name, count) for name, count in zip(names, counts, strict=True))
    warmup, total = (0, *counts)[-2:]
    if warmup > total:
        raise OptionError(
            f"{function}: warmup is {warmup} and total is {total}; warmup must not exceed total, "
            "which counts the warm-up too."
        )
    parts = [describe(peak), *map(str, counts)]
    parts += [f"end={describe(end)}"] if end else []
    parts += [f"power={describe(shape.power)}"] if isinstance(shape, _Power) and shape.power != 1 else []
    return _Curve(f"{function}({', '.join(parts)})", peak, end, warmup, total, shape)


def _power(function: str, power: float) -> _Power:
    power = _number(function, "power", power)
    if power <= 0:
        raise OptionError(f"{function}: power is {describe(power)}; it must be greater than 0.")
    return _Power(power)


def _schedule(function: str, argument: str, value: float | Schedule) -> Schedule:
    if callable(value):
        return value
    return constant(_number(function, argument, value, "a finite number, or a function from step to number"))


def _number(function: str, argument: str, value: object, needed: str = "a finite number") -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise OptionError(f"{function}: {argument} is {value!r}; it must be {needed}.")
    return float(value)


def _count(function: str, argument: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise OptionError(f"{function}: {argument} is {value!r}; it must be an integer of at least 0.")
    return int(value)
