"""Constant, linear and polynomial, bare and warmed up."""

from __future__ import annotations

from dataclasses import dataclass

from ftrain.optim.schedules.curve import Curve, decay
from ftrain.optim.schedules.inputs import count, number, positive
from ftrain.optim.schedules.text import spelled
from ftrain.types import Schedule


def _line(done: int, steps: int) -> float:
    return (steps - done) / steps


def _line_to(peak: float, end: float, share: float) -> float:
    return end + (peak - end) * share


@dataclass(frozen=True)
class _Power:
    power: float

    def __call__(self, done: int, steps: int) -> float:
        return float((1.0 - done / steps) ** self.power)


def _power_to(peak: float, end: float, share: float) -> float:
    value = end + (peak - end) * share
    # transformers divides by the peak, with which LambdaLR multiplies again.
    return peak * (value / peak) if share and abs(end) < abs(peak) else value


def constant(value: float) -> Schedule:
    """The same value at every step.

    Raises:
        OptionError: `value` is not a finite number.

    >>> constant(0.1)(1000)
    0.1
    """
    value = number("constant", "value", value)
    return Curve(spelled(constant, value=value), value, value, 0, 0, _line)


def warmup_constant(peak: float, warmup: int) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then `peak`.

    Raises:
        OptionError: `peak` is not a finite number, or `warmup` not an integer of at least 0.

    >>> [warmup_constant(1.0, 2)(k) for k in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    peak, warmup = number("warmup_constant", "peak", peak), count("warmup_constant", "warmup", warmup)
    return Curve(spelled(warmup_constant, peak=peak, warmup=warmup), peak, peak, warmup, warmup, _line)


def linear(start: float, end: float, steps: int) -> Schedule:
    """``start + (end - start) k / steps``, then `end`.

    Raises:
        OptionError: `start` or `end` is not a finite number, or `steps` not an integer of at least 0.

    >>> [linear(1.0, 0.0, 4)(k) for k in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    start, end = number("linear", "start", start), number("linear", "end", end)
    steps = count("linear", "steps", steps)
    return Curve(spelled(linear, start=start, end=end, steps=steps), start, end, 0, steps, _line, _line_to)


def warmup_linear(peak: float, warmup: int, total: int, end: float = 0.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then as `linear` from `peak` to `end`, reached at `total`.

    Raises:
        OptionError: a value is not a finite number, or not ``0 <= warmup <= total`` in integers.

    >>> [warmup_linear(1.0, 2, 4)(k) for k in range(6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    return decay(warmup_linear, _line, peak, warmup, total, end, blend=_line_to)


def polynomial(peak: float, total: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """``end + (peak - end) (1 - k / total)^power``, then `end`.

    Raises:
        OptionError: a value is not a finite number, `power` is not positive, or `total` is not an
            integer of at least 0.

    >>> [polynomial(1.0, 4, power=2)(k) for k in range(6)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    power = positive("polynomial", "power", power)
    return decay(polynomial, _Power(power), peak, 0, total, end, blend=_power_to, power=power)


def warmup_polynomial(peak: float, warmup: int, total: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then as `polynomial` from `peak` to `end`, reached at `total`.

    Raises:
        OptionError: a value is not a finite number, `power` is not positive, or not
            ``0 <= warmup <= total`` in integers.

    >>> [warmup_polynomial(1.0, 2, 4, power=2)(k) for k in range(6)]
    [0.0, 0.5, 1.0, 0.25, 0.0, 0.0]
    """
    power = positive("warmup_polynomial", "power", power)
    return decay(warmup_polynomial, _Power(power), peak, warmup, total, end, blend=_power_to, power=power)
