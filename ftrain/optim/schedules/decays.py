"""Constant, linear, polynomial, cosine, inverse square root and exponential: bare, and after a linear warm-up.

The order of the floating-point operations is that of ``transformers.optimization`` under torch's ``LambdaLR``, so
that values are equal to the last bit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TypeAlias

from ftrain.errors import OptionError
from ftrain.optim.schedules.call import Call
from ftrain.optim.schedules.checks import count, number, positive
from ftrain.types import Schedule

Remaining: TypeAlias = Callable[[int, int], float]
"""``(k, steps)`` -> the share of a decay that is left after k of its steps: from 1 at first to 0 at the end."""
Mix: TypeAlias = Callable[[float, float, float], float]
"""``(peak, end, share)`` -> ``end + (peak - end) share``, in some order of operations."""

_TIMESCALE = 10_000


def mix_by_peak(peak: float, end: float, share: float) -> float:
    """``end + (peak - end) share``, computed as a multiple of `peak` where that is the larger, as LambdaLR does."""
    if share in (0.0, 1.0):
        return peak if share else end
    if abs(end) >= abs(peak):
        return _mix(peak, end, share)
    floor = end / peak
    return peak * (share * (1.0 - floor) + floor)


def _mix(peak: float, end: float, share: float) -> float:
    return end + (peak - end) * share


def _mix_polynomial(peak: float, end: float, share: float) -> float:
    value = _mix(peak, end, share)
    # transformers divides by the peak, and LambdaLR multiplies by it again.
    return peak * (value / peak) if share and abs(end) < abs(peak) else value


def _line(k: int, steps: int) -> float:
    return (steps - k) / steps


def _power(power: float) -> Remaining:
    return lambda k, steps: float((1.0 - k / steps) ** power)


def _cosine(waves: float) -> Remaining:
    return lambda k, steps: 0.5 * (1.0 + math.cos(math.pi * waves * 2.0 * (k / steps)))


def _restarts(cycles: int) -> Remaining:
    def remaining(k: int, steps: int) -> float:
        if k == steps:
            return 0.0
        # Compared as integers: in floats, step 21 of 22 in 22 cycles is below a restart, where transformers returns 0.
        if k * cycles % steps == 0:
            return 1.0
        return 0.5 * (1.0 + math.cos(math.pi * ((cycles * (k / steps)) % 1.0)))

    return remaining


def _decay(
    function: Callable[..., Schedule],
    remaining: Remaining,
    mix: Mix,
    peak: float,
    warmup: int,
    total: int,
    end: float,
    **options: float,
) -> Schedule:
    """The call of `function`: ``peak k / warmup``, then ``mix(peak, end, share left)``, and `end` from `total` on."""
    name = function.__name__
    peak, end = number(name, "peak", peak), number(name, "end", end)
    warmup, total = count(name, "warmup", warmup), count(name, "total", total)
    if warmup > total:
        raise OptionError(
            f"{name}: warmup is {warmup} and total is {total}; warmup must not exceed total, "
            "which counts the warm-up too."
        )
    arguments = {"peak": peak, "warmup": warmup, "total": total, "end": end, **options}
    arguments = {key: arguments[key] for key in inspect.signature(function).parameters}
    return Call(function, arguments, _curve(remaining, mix, peak, warmup, total, end))


def _curve(remaining: Remaining, mix: Mix, peak: float, warmup: int, total: int, end: float) -> Callable[[int], float]:
    steps = total - warmup

    def value(step: int) -> float:
        if step < warmup:
            return peak * (step / warmup)
        if step == warmup:
            return peak
        return mix(peak, end, remaining(min(step - warmup, steps), steps)) if steps else end

    return value


def constant(value: float) -> Schedule:
    """``value`` at every step.

    Raises:
        OptionError: `value` is not a finite number.

    >>> constant(0.1)(1000)
    0.1
    """
    value = number("constant", "value", value)
    return Call(constant, {"value": value}, lambda step: value)


def warmup_constant(peak: float, warmup: int) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then ``peak``.

    Raises:
        OptionError: `peak` is not a finite number, or `warmup` is not an integer of at least 0.

    >>> [warmup_constant(1.0, 2)(k) for k in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    peak, warmup = number("warmup_constant", "peak", peak), count("warmup_constant", "warmup", warmup)
    arguments = {"peak": peak, "warmup": warmup}
    return Call(warmup_constant, arguments, lambda step: peak * (step / warmup) if step < warmup else peak)


def linear(start: float, end: float, steps: int) -> Schedule:
    """``start + (end - start) k / steps``, then ``end``.

    Raises:
        OptionError: `start` or `end` is not a finite number, or `steps` is not an integer of at least 0.

    >>> [linear(1.0, 0.0, 4)(k) for k in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    start, end, steps = number("linear", "start", start), number("linear", "end", end), count("linear", "steps", steps)
    arguments = {"start": start, "end": end, "steps": steps}
    return Call(linear, arguments, _curve(_line, _mix, start, 0, steps, end))


def warmup_linear(peak: float, warmup: int, total: int, end: float = 0.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then `linear` from ``peak`` to ``end`` at ``k = total``.

    Raises:
        OptionError: `peak` or `end` is not a finite number, or not ``0 <= warmup <= total`` in integers.

    >>> [warmup_linear(1.0, 2, 4)(k) for k in range(6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    return _decay(warmup_linear, _line, _mix, peak, warmup, total, end)


def polynomial(peak: float, total: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """``end + (peak - end) (1 - k / total)^power``, then ``end``.

    Raises:
        OptionError: a value is not a finite number, `power` is not positive, or `total` is not an integer of at
            least 0.

    >>> [polynomial(1.0, 4, power=2)(k) for k in range(6)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    power = positive("polynomial", "power", power)
    return _decay(polynomial, _power(power), _mix_polynomial, peak, 0, total, end, power=power)


def warmup_polynomial(peak: float, warmup: int, total: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then `polynomial` from ``peak`` to ``end`` at ``k = total``.

    Raises:
        OptionError: a value is not a finite number, `power` is not positive, or not ``0 <= warmup <= total`` in
            integers.

    >>> [warmup_polynomial(1.0, 2, 4, power=2)(k) for k in range(6)]
    [0.0, 0.5, 1.0, 0.25, 0.0, 0.0]
    """
    power = positive("warmup_polynomial", "power", power)
    return _decay(warmup_polynomial, _power(power), _mix_polynomial, peak, warmup, total, end, power=power)


def cosine(peak: float, total: int, end: float = 0.0, waves: float = 0.5) -> Schedule:
    """``end + (peak - end) (1 + cos(2 pi waves k / total)) / 2``, then its value at ``k = total``.

    Half a wave falls once, from ``peak`` to ``end``.

    Raises:
        OptionError: a value is not a finite number, `waves` is not positive, or `total` is not an integer of at
            least 0.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, equation 5.

    >>> [round(cosine(1.0, 4)(k), 3) for k in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    waves = positive("cosine", "waves", waves)
    return _decay(cosine, _cosine(waves), mix_by_peak, peak, 0, total, end, waves=waves)


def warmup_cosine(peak: float, warmup: int, total: int, end: float = 0.0, waves: float = 0.5) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then `cosine` from ``peak`` to ``end`` at ``k = total``.

    Raises:
        OptionError: a value is not a finite number, `waves` is not positive, or not ``0 <= warmup <= total`` in
            integers.

    >>> warmup_cosine(1e-3, 10, 100, end=1e-5)
    warmup_cosine(1e-3, 10, 100, end=1e-5)
    """
    waves = positive("warmup_cosine", "waves", waves)
    return _decay(warmup_cosine, _cosine(waves), mix_by_peak, peak, warmup, total, end, waves=waves)


def cosine_restarts(peak: float, total: int, cycles: int, end: float = 0.0) -> Schedule:
    """``end + (peak - end) (1 + cos(pi (cycles k / total mod 1))) / 2``, then ``end``.

    Each cycle starts at ``peak`` again. For cycles that grow, `chain` several of `cosine`.

    Raises:
        OptionError: a value is not a finite number, `cycles` is not an integer of at least 1, or `total` is not
            one of at least 0.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, equation 5.

    >>> [round(cosine_restarts(1.0, 8, cycles=2)(k), 3) for k in range(9)]
    [1.0, 0.854, 0.5, 0.146, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    cycles = count("cosine_restarts", "cycles", cycles, least=1)
    return _decay(cosine_restarts, _restarts(cycles), mix_by_peak, peak, 0, total, end, cycles=cycles)


def warmup_cosine_restarts(peak: float, warmup: int, total: int, cycles: int, end: float = 0.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then `cosine_restarts`, whose last cycle ends at ``k = total``.

    Raises:
        OptionError: a value is not a finite number, `cycles` is not an integer of at least 1, or not
            ``0 <= warmup <= total`` in integers.

    >>> warmup_cosine_restarts(1e-3, 10, 100, cycles=3)
    warmup_cosine_restarts(1e-3, 10, 100, 3)
    """
    cycles = count("warmup_cosine_restarts", "cycles", cycles, least=1)
    return _decay(warmup_cosine_restarts, _restarts(cycles), mix_by_peak, peak, warmup, total, end, cycles=cycles)


def inverse_sqrt(peak: float, timescale: int = _TIMESCALE) -> Schedule:
    """``peak / sqrt(1 + k / timescale)``, which needs no total.

    Raises:
        OptionError: `peak` is not a finite number, or `timescale` is not an integer of at least 1.

    Source: Zhai et al., Scaling Vision Transformers, https://arxiv.org/abs/2106.04560, section 3.5.

    >>> [inverse_sqrt(1.0, timescale=100)(k) for k in (0, 300, 1500)]
    [1.0, 0.5, 0.25]
    """
    peak = number("inverse_sqrt", "peak", peak)
    timescale = count("inverse_sqrt", "timescale", timescale, least=1)
    return Call(inverse_sqrt, {"peak": peak, "timescale": timescale}, _inverse_sqrt(peak, 0, timescale))


def warmup_inverse_sqrt(peak: float, warmup: int, timescale: int | None = None) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then ``peak / sqrt(1 + (k - warmup) / timescale)``.

    Args:
        peak: the value at ``k = warmup``.
        warmup: steps of the warm-up.
        timescale: in steps. Default: `warmup`, which makes the decay ``peak sqrt(warmup / k)``, that of the first
            transformer; 10,000 without a warm-up.

    Raises:
        OptionError: `peak` is not a finite number, `warmup` is not an integer of at least 0, or `timescale` is not
            one of at least 1.

    Source: Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762, section 5.3.

    >>> [warmup_inverse_sqrt(1.0, 100)(k) for k in (0, 50, 100, 400, 1600)]
    [0.0, 0.5, 1.0, 0.5, 0.25]
    """
    name = "warmup_inverse_sqrt"
    peak, warmup = number(name, "peak", peak), count(name, "warmup", warmup)
    if timescale is not None:
        timescale = count(name, "timescale", timescale, least=1)
    arguments = {"peak": peak, "warmup": warmup, "timescale": timescale}
    return Call(warmup_inverse_sqrt, arguments, _inverse_sqrt(peak, warmup, timescale or warmup or _TIMESCALE))


def _inverse_sqrt(peak: float, warmup: int, timescale: int) -> Callable[[int], float]:
    def value(step: int) -> float:
        if step < warmup:
            return peak * (step / warmup)
        return peak * (1.0 / math.sqrt((step + (timescale - warmup)) / timescale))

    return value


def step_decay(value: float, every: int, factor: float = 0.1) -> Schedule:
    """``value factor^floor(k / every)``: torch's ``StepLR``. For other steps than multiples, use `piecewise`.

    Raises:
        OptionError: `value` is not a finite number, `every` is not an integer of at least 1, or not
            ``0 < factor <= 1``.

    >>> [step_decay(1.0, 2, factor=0.5)(k) for k in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    value, every = number("step_decay", "value", value), count("step_decay", "every", every, least=1)
    factor = positive("step_decay", "factor", factor, most=1.0)
    arguments = {"value": value, "every": every, "factor": factor}
    return Call(step_decay, arguments, lambda step: value * factor ** (step // every))


def exponential(value: float, factor: float, steps: int = 1) -> Schedule:
    """``value factor^(k / steps)``: torch's ``ExponentialLR`` where `steps` is 1.

    Raises:
        OptionError: `value` is not a finite number, not ``0 < factor <= 1``, or `steps` is not an integer of at
            least 1.

    >>> [exponential(1.0, 0.25, steps=2)(k) for k in range(5)]
    [1.0, 0.5, 0.25, 0.125, 0.0625]
    """
    value, factor = number("exponential", "value", value), positive("exponential", "factor", factor, most=1.0)
    steps = count("exponential", "steps", steps, least=1)
    arguments = {"value": value, "factor": factor, "steps": steps}
    return Call(exponential, arguments, lambda step: value * factor ** (step / steps))
