"""One cycle: from a small value up to the peak and down to a much smaller one."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ftrain.errors import OptionError
from ftrain.optim.schedules.curve import BETWEEN
from ftrain.optim.schedules.inputs import choice, count, number
from ftrain.optim.schedules.text import Written, describe, spelled
from ftrain.types import Schedule


@dataclass(frozen=True, repr=False)
class _Cycle(Written):
    """From each of the values to the next, reached at the step of the same number in `ends`."""

    values: tuple[float, ...]
    ends: tuple[float, ...]
    shape: str

    def __call__(self, step: int) -> float:
        at = min(max(step, 0), self.ends[-1])
        phase = bisect_left(self.ends, at)
        begin, end = (0.0, *self.ends)[phase], self.ends[phase]
        share = (at - begin) / (end - begin) if end > begin else 1.0
        return BETWEEN[self.shape](self.values[phase], self.values[phase + 1], share)


def one_cycle(
    peak: float,
    total: int,
    *,
    rise: float = 0.3,
    start: float | None = None,
    end: float | None = None,
    shape: str = "cosine",
    three_phase: bool = False,
) -> Schedule:
    """From `start` to `peak` in a share `rise` of the steps, then to `end`: torch's ``OneCycleLR``.

    As there, the peak is at ``k = rise total - 1`` and the end at ``k = total - 1``, the last step.

    Args:
        peak: the largest value; torch's max_lr.
        total: steps of the cycle.
        rise: share of the steps going up; torch's pct_start.
        start: the first value; a 25th of the peak where it is not given (torch's div_factor).
        end: the last value, which is held; a 10,000th of the first where it is not given (torch's
            final_div_factor).
        shape: cosine or linear; torch's anneal_strategy.
        three_phase: go back to `start` as slowly as up, and to `end` in what steps remain.

    Raises:
        OptionError: a value is not a finite number, `total` is not an integer of at least 1, not
            ``0 <= rise < 1`` (``<= 0.5`` in three phases), or the shape is another.

    Source: Smith and Topin, Super-Convergence, https://arxiv.org/abs/1708.07120.

    >>> schedule = one_cycle(1.0, 10, start=0.1, end=0.0, shape="linear")
    >>> [round(schedule(k), 2) for k in (0, 1, 2, 9, 10)]
    [0.1, 0.55, 1.0, 0.0, 0.0]
    """
    name = "one_cycle"
    peak, total, rise = number(name, "peak", peak), count(name, "total", total, least=1), number(name, "rise", rise)
    start = None if start is None else number(name, "start", start)
    end = None if end is None else number(name, "end", end)
    choice(name, "shape", shape, BETWEEN)
    _require_rise(rise, three_phase)
    text = spelled(
        one_cycle, peak=peak, total=total, rise=rise, start=start, end=end, shape=shape, three_phase=three_phase
    )
    first = peak / 25.0 if start is None else start
    last = first / 1e4 if end is None else end
    if three_phase:
        ends = (rise * total - 1, 2 * rise * total - 2, float(total - 1))
        return _Cycle(text, (first, peak, first, last), ends, shape)
    return _Cycle(text, (first, peak, last), (rise * total - 1, float(total - 1)), shape)


def _require_rise(rise: float, three_phase: bool) -> None:
    if not isinstance(three_phase, bool):
        raise OptionError(f"one_cycle: three_phase is {three_phase!r}; it must be True or False.")
    if not (0 <= rise <= 0.5 if three_phase else 0 <= rise < 1):
        needed = "0 <= rise <= 0.5 in three phases" if three_phase else "0 <= rise < 1"
        raise OptionError(f"one_cycle: rise is {describe(rise)}; it must be {needed}.")
