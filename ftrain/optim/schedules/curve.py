"""The curve that most schedules are: up to a peak, then down to an end along some shape.

The order of operations is that of ``transformers.optimization`` under torch's ``LambdaLR``, so that the
values are too, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ftrain.optim.schedules.inputs import count, number, require_within
from ftrain.optim.schedules.text import Written, spelled
from ftrain.types import Schedule

Shape: TypeAlias = Callable[[int, int], float]
"""From the steps done, of how many, to the share of the way still to go: from 1 at first to 0 at the end."""
Blend: TypeAlias = Callable[[float, float, float], float]
"""From peak, end and the share of the way still to go, to the value."""


def share_of_peak(peak: float, end: float, share: float) -> float:
    """``end + (peak - end) share``, in shares of the peak where that is the larger."""
    if share in (0.0, 1.0):
        return peak if share else end
    if abs(end) >= abs(peak):
        return end + (peak - end) * share
    floor = end / peak
    return peak * (share * (1.0 - floor) + floor)


@dataclass(frozen=True, repr=False)
class Curve(Written):
    """From 0 up to `peak` in `warmup` steps, then to `end` at `total` along `shape`."""

    peak: float
    end: float
    warmup: int
    total: int
    shape: Shape
    blend: Blend = share_of_peak

    def __call__(self, step: int) -> float:
        """The value at a step."""
        step = max(step, 0)
        if step < self.warmup:
            return self.peak * (step / self.warmup)
        if step == self.warmup:
            return self.peak
        if self.warmup == self.total:
            return self.end
        steps = self.total - self.warmup
        return self.blend(self.peak, self.end, self.shape(min(step - self.warmup, steps), steps))


def decay(
    function: Callable[..., Schedule],
    shape: Shape,
    peak: float,
    warmup: int,
    total: int,
    end: float,
    *,
    blend: Blend = share_of_peak,
    **options: float,
) -> Schedule:
    """The curve that a function was asked for; its options are those of its shape, for its text.

    Raises:
        OptionError: a value is not a finite number, or not ``0 <= warmup <= total`` in integers.
    """
    name = function.__name__
    peak, end = number(name, "peak", peak), number(name, "end", end)
    warmup, total = count(name, "warmup", warmup), count(name, "total", total)
    require_within(name, warmup, total)
    text = spelled(function, peak=peak, warmup=warmup, total=total, end=end, **options)
    return Curve(text, peak, end, warmup, total, shape, blend)


def along_line(start: float, end: float, share: float) -> float:
    """``start + (end - start) share``."""
    return (end - start) * share + start


def along_cosine(start: float, end: float, share: float) -> float:
    """``end + (start - end) (1 + cos(pi share)) / 2``."""
    return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1.0)


BETWEEN: dict[str, Blend] = {"linear": along_line, "cosine": along_cosine}
"""Ways from one value to another by the share of the way that is done."""
