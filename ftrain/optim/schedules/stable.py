"""Warm-up, a stable stretch at the peak, and a decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ftrain.errors import OptionError
from ftrain.optim.schedules.curve import share_of_peak
from ftrain.optim.schedules.inputs import choice, count, number
from ftrain.optim.schedules.text import Written, spelled
from ftrain.types import Schedule

# From the share of the way done to the height: from 0 to 1 going up, from 1 to 0 going down.
_UP: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(1.0 - done),
}
_DOWN: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(done),
}


@dataclass(frozen=True, repr=False)
class _Stable(Written):
    start: float
    peak: float
    end: float
    warmup: int
    total: int
    decay: int
    warmup_shape: str
    decay_shape: str

    def __call__(self, step: int) -> float:
        step = max(step, 0)
        if step < self.warmup:
            return share_of_peak(self.peak, self.start, _UP[self.warmup_shape](step / self.warmup))
        if step >= self.total:
            return self.end
        done = step - (self.total - self.decay)
        if done <= 0:
            return self.peak
        return share_of_peak(self.peak, self.end, _DOWN[self.decay_shape](done / self.decay))


def warmup_stable_decay(
    peak: float,
    warmup: int,
    total: int,
    decay: int,
    end: float = 0.0,
    *,
    start: float = 0.0,
    warmup_shape: str = "linear",
    decay_shape: str = "cosine",
) -> Schedule:
    """From `start` up to `peak` in `warmup` steps, `peak`, and to `end` in the last `decay` of `total` steps.

    With ``p`` the share of a stretch that is done, its height is ``p`` (linear), ``(1 - cos(pi p)) / 2``
    (cosine) or ``1 - sqrt(1 - p)`` (1-sqrt) in the warm-up, and ``1 - p``, ``(1 + cos(pi p)) / 2`` or
    ``1 - sqrt(p)`` in the decay. What ran to the start of the decay can go on to a larger total.

    Args:
        peak: the value of the stable stretch.
        warmup: steps of the warm-up.
        total: steps in all: warm-up, stable stretch and decay.
        decay: steps of the decay.
        end: reached at `total` and held.
        start: where the warm-up starts.
        warmup_shape: linear, cosine or 1-sqrt.
        decay_shape: linear, cosine or 1-sqrt.

    Raises:
        OptionError: a value is not a finite number, a count not an integer of at least 0, warm-up and
            decay together exceed the total, or a shape is another.

    Source: Hu et al., MiniCPM, https://arxiv.org/abs/2404.06395; Hägele et al.,
    https://arxiv.org/abs/2405.18392, for 1-sqrt.

    >>> [warmup_stable_decay(1.0, 2, 8, 4, decay_shape="linear")(k) for k in range(9)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    name = "warmup_stable_decay"
    start, peak, end = number(name, "start", start), number(name, "peak", peak), number(name, "end", end)
    warmup, total, decay = count(name, "warmup", warmup), count(name, "total", total), count(name, "decay", decay)
    up, down = choice(name, "warmup_shape", warmup_shape, _UP), choice(name, "decay_shape", decay_shape, _DOWN)
    if warmup + decay > total:
        raise OptionError(
            f"{name}: warmup is {warmup}, decay {decay} and total {total}; warmup and decay together "
            "must not exceed total, which counts both."
        )
    values, steps = {"peak": peak, "end": end, "start": start}, {"warmup": warmup, "total": total, "decay": decay}
    text = spelled(warmup_stable_decay, **values, **steps, warmup_shape=up, decay_shape=down)
    return _Stable(text, start, peak, end, warmup, total, decay, up, down)
