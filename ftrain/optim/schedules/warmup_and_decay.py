"""Constant, linear, polynomial, cosine, inverse square root and exponential, with and without a linear warm-up.

The order of the floating-point operations is that of ``transformers.optimization`` under torch's ``LambdaLR``, so
that values are equal to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from ftrain.errors import OptionError, require_positive_number, whole_number
from ftrain.optim.schedules.call import schedule
from ftrain.optim.schedules.checks import count_from_1, fraction, number
from ftrain.types import Schedule

Mix: TypeAlias = Callable[[float, float, float], float]
"""``(peak, end, share)`` -> ``end + (peak - end) share``, in some order of operations."""

TIMESCALE = 10_000
"""The default of transformers if there is no warm-up."""


def mix_by_peak(peak: float, end: float, share: float) -> float:
    """Return ``end + (peak - end) share``, computed as a multiple of `peak` if that is larger, as LambdaLR does."""
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


def _decay(peak: float, end: float, total: int, mix: Mix, remaining: Callable[[int], float]) -> Schedule:
    """``mix(peak, end, remaining(k))``, where `remaining` is the remaining fraction of the decay after k steps."""

    def value(k: int) -> float:
        if not total:
            return end
        return mix(peak, end, remaining(min(k, total))) if k else peak

    return value


def _after_warmup(peak: float, warmup: int, decay: Schedule) -> Schedule:
    return lambda k: peak * (k / warmup) if k < warmup else decay(k - warmup)


def _steps_after_warmup(function: str, warmup: int, total: int) -> int:
    if warmup > total:
        raise OptionError(
            f"{function}: warmup is {warmup} and total is {total}; warmup must not exceed total, which counts it too."
        )
    return total - warmup


@schedule(value=number)
def constant(value: float) -> Schedule:
    """``value`` at every step."""
    return lambda k: value


@schedule(peak=number, warmup=whole_number)
def warmup_constant(peak: float, warmup: int) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then ``peak``."""
    return _after_warmup(peak, warmup, constant(peak))


@schedule(start=number, end=number, steps=whole_number)
def linear(start: float, end: float, steps: int) -> Schedule:
    """``start + (end - start) k / steps``, then ``end``."""
    return _decay(start, end, steps, _mix, lambda k: (steps - k) / steps)


@schedule(peak=number, warmup=whole_number, total=whole_number, end=number)
def warmup_linear(peak: float, warmup: int, total: int, end: float = 0.0) -> Schedule:
    """`linear` from ``peak`` to ``end``, after a warm-up.

    >>> [warmup_linear(1.0, 2, 4)(k) for k in range(6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    steps = _steps_after_warmup("warmup_linear", warmup, total)
    return _after_warmup(peak, warmup, linear(peak, end, steps))


@schedule(peak=number, total=whole_number, end=number, power=require_positive_number)
def polynomial(peak: float, total: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """``end + (peak - end) (1 - k / total)^power``; `power` is greater than 0."""
    return _decay(peak, end, total, _mix_polynomial, lambda k: float((1.0 - k / total) ** power))


@schedule(peak=number, warmup=whole_number, total=whole_number, end=number, power=require_positive_number)
def warmup_polynomial(peak: float, warmup: int, total: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """`polynomial` after a warm-up."""
    steps = _steps_after_warmup("warmup_polynomial", warmup, total)
    return _after_warmup(peak, warmup, polynomial(peak, steps, end, power))


@schedule(peak=number, total=whole_number, end=number, waves=require_positive_number)
def cosine(peak: float, total: int, end: float = 0.0, waves: float = 0.5) -> Schedule:
    """``end + (peak - end) (1 + cos(2 pi waves k / total)) / 2``, then its value at ``k = total``.

    Half a wave goes from ``peak`` to ``end``; `waves` is greater than 0.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, equation 5.
    """
    return _decay(peak, end, total, mix_by_peak, lambda k: 0.5 * (1.0 + math.cos(math.pi * waves * 2.0 * (k / total))))


@schedule(peak=number, warmup=whole_number, total=whole_number, end=number, waves=require_positive_number)
def warmup_cosine(peak: float, warmup: int, total: int, end: float = 0.0, waves: float = 0.5) -> Schedule:
    """`cosine` after a warm-up."""
    steps = _steps_after_warmup("warmup_cosine", warmup, total)
    return _after_warmup(peak, warmup, cosine(peak, steps, end, waves))


@schedule(peak=number, total=whole_number, cycles=count_from_1, end=number)
def cosine_restarts(peak: float, total: int, cycles: int, end: float = 0.0) -> Schedule:
    """``end + (peak - end) (1 + cos(pi (cycles k / total mod 1))) / 2``, then ``end``; the source is that of `cosine`.

    Each cycle starts at ``peak``. For cycles that grow, `chain` several of `cosine`.

    >>> [round(cosine_restarts(1.0, 8, cycles=2)(k), 3) for k in range(9)]
    [1.0, 0.854, 0.5, 0.146, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def remaining(k: int) -> float:
        if k == total:
            return 0.0
        # Integers are exact. In floats, step 21 of 22 in 22 cycles is just below a restart, and transformers returns 0.
        if k * cycles % total == 0:
            return 1.0
        return 0.5 * (1.0 + math.cos(math.pi * ((cycles * (k / total)) % 1.0)))

    return _decay(peak, end, total, mix_by_peak, remaining)


@schedule(peak=number, warmup=whole_number, total=whole_number, cycles=count_from_1, end=number)
def warmup_cosine_restarts(peak: float, warmup: int, total: int, cycles: int, end: float = 0.0) -> Schedule:
    """`cosine_restarts` after a warm-up."""
    steps = _steps_after_warmup("warmup_cosine_restarts", warmup, total)
    return _after_warmup(peak, warmup, cosine_restarts(peak, steps, cycles, end))


@schedule(peak=number, timescale=count_from_1)
def inverse_sqrt(peak: float, timescale: int = TIMESCALE) -> Schedule:
    """``peak / sqrt(1 + k / timescale)``, without a total.

    Source: Zhai et al., Scaling Vision Transformers, https://arxiv.org/abs/2106.04560, section 3.5.
    """
    return lambda k: peak * (1.0 / math.sqrt((k + timescale) / timescale))


@schedule(peak=number, warmup=whole_number, timescale=count_from_1)
def warmup_inverse_sqrt(peak: float, warmup: int, timescale: int | None = None) -> Schedule:
    """`inverse_sqrt` after a warm-up.

    By default `timescale` is `warmup`, which makes the decay ``peak sqrt(warmup / k)``, that of the first transformer
    (Vaswani et al., https://arxiv.org/abs/1706.03762, section 5.3); without a warm-up it is 10,000.
    """
    return _after_warmup(peak, warmup, inverse_sqrt(peak, timescale or warmup or TIMESCALE))


@schedule(value=number, every=count_from_1, factor=fraction)
def step_decay(value: float, every: int, factor: float = 0.1) -> Schedule:
    """``value factor^floor(k / every)``, with ``0 < factor <= 1``: torch's ``StepLR``."""
    return lambda k: value * factor ** (k // every)


@schedule(value=number, factor=fraction, steps=count_from_1)
def exponential(value: float, factor: float, steps: int = 1) -> Schedule:
    """``value factor^(k / steps)``, with ``0 < factor <= 1``: torch's ``ExponentialLR`` where `steps` is 1."""
    return lambda k: value * factor ** (k / steps)
