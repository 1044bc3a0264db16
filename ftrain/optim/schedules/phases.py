"""Schedules in several phases: values at chosen steps, one cycle, and a stable phase between warm-up and decay."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Literal

from ftrain.errors import OptionError, whole_number
from ftrain.optim.schedules.call import describe, schedule
from ftrain.optim.schedules.checks import count_from_1, flag, number, one_of, require_sorted
from ftrain.optim.schedules.warmup_and_decay import mix_by_peak
from ftrain.types import Schedule

# Name of a shape -> function (start, end, completed fraction) -> value, in torch's order of operations.
_INTERPOLATE: dict[str, Callable[[float, float, float], float]] = {
    "linear": lambda start, end, done: (end - start) * done + start,
    "cosine": lambda start, end, done: end + (start - end) / 2.0 * (math.cos(math.pi * done) + 1.0),
}
# Name of a shape -> function from the completed fraction to the height, as in transformers: from 0 to 1 in a warm-up,
# and from 1 to 0 in a decay.
_WARMUP_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(1.0 - done),
}
_DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(done),
}


def _points(function: str, argument: str, value: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(value, Mapping) or not value:
        raise OptionError(f"{function}: {argument} is {value!r}; it must map at least one step to a value.")
    steps = [whole_number(function, f"a step of {argument}", step) for step in value]
    values = [number(function, f"{argument}[{step}]", each) for step, each in value.items()]
    require_sorted(function, argument, steps)
    return dict(zip(steps, values, strict=True))


@schedule(points=_points, between=one_of("constant", *_INTERPOLATE))
def piecewise(points: Mapping[int, float], between: Literal["constant", "linear", "cosine"] = "constant") -> Schedule:
    """The values of `points` at their steps; between two points the value of the first, a line or half a cosine.

    Constant pieces are torch's ``MultiStepLR`` with the values written out; lines and cosines are optax's
    ``piecewise_interpolate_schedule``. The first value holds before its step, the last one after it.

    Args:
        points: step -> value, at least one, smallest step first.
        between: constant, linear or cosine.

    >>> [piecewise({0: 1.0, 2: 0.5, 4: 0.0}, between="linear")(k) for k in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    steps, values = list(points), list(points.values())

    def value(step: int) -> float:
        index = max(bisect_right(steps, step) - 1, 0)
        start = steps[index]
        if between == "constant" or step <= start or index == len(steps) - 1:
            return values[index]
        done = (step - start) / (steps[index + 1] - start)
        return _INTERPOLATE[between](values[index], values[index + 1], done)

    return value


@schedule(
    peak=number,
    total=count_from_1,
    rise=number,
    start=number,
    end=number,
    shape=one_of(*_INTERPOLATE),
    three_phase=flag,
)
def one_cycle(
    peak: float,
    total: int,
    *,
    rise: float = 0.3,
    start: float | None = None,
    end: float | None = None,
    shape: Literal["linear", "cosine"] = "cosine",
    three_phase: bool = False,
) -> Schedule:
    """From `start` to `peak` in a share `rise` of the steps, then to `end`: torch's ``OneCycleLR``.

    As there, the peak is at ``k = rise total - 1`` and the end at ``k = total - 1``, the last step.

    Args:
        peak: the largest value; torch's max_lr.
        total: steps of the cycle, at least 1.
        rise: share of the steps going up, in [0, 1), or [0, 0.5] in three phases; torch's pct_start.
        start: the first value. Default: ``peak / 25`` (torch's div_factor).
        end: the last value, which is held. Default: ``start / 10000`` (torch's final_div_factor).
        shape: cosine or linear; torch's anneal_strategy.
        three_phase: go back to `start` in as many steps as up, and to `end` in the rest.

    Raises:
        OptionError: `rise` is out of its range.

    Source: Smith and Topin, Super-Convergence, https://arxiv.org/abs/1708.07120.
    """
    if not (0 <= rise <= 0.5 if three_phase else 0 <= rise < 1):
        needed = "0 <= rise <= 0.5 in three phases" if three_phase else "0 <= rise < 1"
        raise OptionError(f"one_cycle: rise is {describe(rise)}; it must be {needed}.")
    start = peak / 25.0 if start is None else start
    end = start / 1e4 if end is None else end
    # Values, and the step at which each is reached, which may be a fraction.
    values, steps = [start, peak, end], [0.0, rise * total - 1, float(total - 1)]
    if three_phase:
        values, steps = [start, peak, start, end], [*steps[:2], 2 * rise * total - 2, steps[-1]]

    def value(step: int) -> float:
        k = min(step, steps[-1])
        index = bisect_left(steps, k, 1)
        first, last = steps[index - 1 : index + 1]
        done = (k - first) / (last - first) if last > first else 1.0
        return _INTERPOLATE[shape](values[index - 1], values[index], done)

    return value


@schedule(
    peak=number,
    warmup=whole_number,
    total=whole_number,
    decay=whole_number,
    end=number,
    start=number,
    warmup_shape=one_of(*_WARMUP_SHAPES),
    decay_shape=one_of(*_DECAY_SHAPES),
)
def warmup_stable_decay(
    peak: float,
    warmup: int,
    total: int,
    decay: int,
    end: float = 0.0,
    *,
    start: float = 0.0,
    warmup_shape: Literal["linear", "cosine", "1-sqrt"] = "linear",
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "cosine",
) -> Schedule:
    """From `start` to `peak` in `warmup` steps, constant, and to `end` in the last `decay` of `total` steps.

    ``start + (peak - start) up(k / warmup)``, then ``peak``, then ``end + (peak - end) down(p)`` where p is the
    completed fraction of the decay. ``up(p)`` is ``p`` (linear), ``(1 - cos(pi p)) / 2`` (cosine) or
    ``1 - sqrt(1 - p)`` (1-sqrt); ``down(p)`` is ``1 - p``, ``(1 + cos(pi p)) / 2`` or ``1 - sqrt(p)``. A run can
    continue from the start of its decay with a larger `total`.

    Raises:
        OptionError: `warmup` and `decay` together exceed `total`, which counts both.

    Source: Hu et al., MiniCPM, https://arxiv.org/abs/2404.06395; Hägele et al., https://arxiv.org/abs/2405.18392,
    for 1-sqrt.
    """
    if warmup + decay > total:
        raise OptionError(
            f"warmup_stable_decay: warmup is {warmup}, decay {decay} and total {total}; warmup and decay together "
            "must not exceed total, which counts both."
        )

    def value(step: int) -> float:
        if step < warmup:
            return mix_by_peak(peak, start, _WARMUP_SHAPES[warmup_shape](step / warmup))
        if step >= total:
            return end
        done = step - (total - decay)
        return peak if done <= 0 else mix_by_peak(peak, end, _DECAY_SHAPES[decay_shape](done / decay))

    return value
