"""Log a warning if the schedules of a run end long before its last step, so that it continues with a rate of 0."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from ftrain.errors import log_on_first_rank
from ftrain.optim.schedules.call import describe, text_defines_values
from ftrain.step.step import Step

MIN_STEPS = 10
"""This many steps at the end of a run, or a tenth of it, may have a rate of 0: totals are often rounded down."""

SAMPLES = 32
"""The number of steps at which a schedule is read in each part of the run."""


def log_ended_schedules(step: Any, first: int, total: int | None) -> None:
    """Log a warning if all learning rates are 0 at the end of a run, which has made `first` of its `total` steps.

    A schedule with a function of a user is not called for later steps: it need not have a value for each of them.
    """
    rates = step.optimizer.schedules if isinstance(step, Step) else {}
    rates = {name: rate for name, rate in rates.items() if name.endswith("lr")}
    if not rates or not total or first >= total or not all(map(text_defines_values, rates.values())):
        return
    tail = total - max(MIN_STEPS, total // 10)
    ends = [_first_zero(rate, max(first, tail), total) for rate in rates.values()]
    if None in ends:
        return
    end = max(end for end in ends if end is not None)
    if tail <= end < first:  # The run was interrupted in its last steps.
        return
    log_on_first_rank(
        "fit: the learning rate is 0 after step %d, and the run goes on to step %d: these steps train nothing. Make "
        "fewer steps, or give the schedule those of the run (not its epochs): %s",
        *(end, total, ", ".join(map(describe, rates.values()))),
    )


def _first_zero(rate: Callable[[int], float], begin: int, total: int) -> int | None:
    """Return the step from which on a rate is 0, if that is at most `begin`; None if it is not 0 later, or always 0."""
    if any(rate(step) for step in _samples(begin, total)):
        return None
    last = max((step for step in _samples(0, begin) if rate(step)), default=None)
    if last is None:
        return None
    return bisect.bisect_left(range(begin), True, last, key=lambda step: not rate(step))


def _samples(begin: int, end: int) -> list[int]:
    """Return some numbers from `begin` up to `end`, without it: equally spaced ones, and others close to `begin`."""
    last = end - 1 - begin
    equal = [last * index // SAMPLES for index in range(SAMPLES + 1)]
    close = [2**power for power in range(64)]
    return [begin + offset for offset in sorted({*equal, *close}) if offset <= last]
