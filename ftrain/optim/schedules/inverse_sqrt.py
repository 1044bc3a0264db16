"""Inverse square root, bare and warmed up: the schedule that needs no total."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftrain.optim.schedules.inputs import count, number
from ftrain.optim.schedules.text import Written, spelled
from ftrain.types import Schedule

_TIMESCALE = 10_000


@dataclass(frozen=True, repr=False)
class _InverseSqrt(Written):
    peak: float
    warmup: int
    timescale: int

    def __call__(self, step: int) -> float:
        step = max(step, 0)
        if step < self.warmup:
            return self.peak * (step / self.warmup)
        return self.peak * (1.0 / math.sqrt((step + (self.timescale - self.warmup)) / self.timescale))


def inverse_sqrt(peak: float, timescale: int = _TIMESCALE) -> Schedule:
    """``peak / sqrt(1 + k / timescale)``.

    Raises:
        OptionError: `peak` is not a finite number, or `timescale` not an integer of at least 1.

    Source: Zhai et al., Scaling Vision Transformers, https://arxiv.org/abs/2106.04560, section 3.5.

    >>> [inverse_sqrt(1.0, timescale=100)(k) for k in (0, 300, 1500)]
    [1.0, 0.5, 0.25]
    """
    peak = number("inverse_sqrt", "peak", peak)
    timescale = count("inverse_sqrt", "timescale", timescale, least=1)
    return _InverseSqrt(spelled(inverse_sqrt, peak=peak, timescale=timescale), peak, 0, timescale)


def warmup_inverse_sqrt(peak: float, warmup: int, timescale: int | None = None) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then ``peak / sqrt(1 + (k - warmup) / timescale)``.

    Args:
        peak: the value at ``k = warmup``.
        warmup: steps of the warm-up.
        timescale: as many steps as the warm-up where it is not given, which makes the decay
            ``peak sqrt(warmup / k)``, that of the first transformer; 10,000 without a warm-up.

    Raises:
        OptionError: `peak` is not a finite number, `warmup` is not an integer of at least 0, or
            `timescale` not one of at least 1.

    Source: Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762, section 5.3.

    >>> [warmup_inverse_sqrt(1.0, 100)(k) for k in (0, 50, 100, 400, 1600)]
    [0.0, 0.5, 1.0, 0.5, 0.25]
    """
    name = "warmup_inverse_sqrt"
    peak, warmup = number(name, "peak", peak), count(name, "warmup", warmup)
    scale = warmup or _TIMESCALE if timescale is None else count(name, "timescale", timescale, least=1)
    text = spelled(warmup_inverse_sqrt, peak=peak, warmup=warmup, timescale=timescale and scale)
    return _InverseSqrt(text, peak, warmup, scale)
