"""Values at chosen steps, and what lies between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from ftrain.errors import OptionError
from ftrain.optim.schedules.curve import BETWEEN
from ftrain.optim.schedules.inputs import choice, count, number, require_sorted
from ftrain.optim.schedules.text import Written, spelled
from ftrain.types import Schedule


@dataclass(frozen=True, repr=False)
class _Pieces(Written):
    steps: tuple[int, ...]
    values: tuple[float, ...]
    between: str

    def __call__(self, step: int) -> float:
        step = max(step, self.steps[0])
        index = bisect_right(self.steps, step) - 1
        begin = self.steps[index]
        if self.between == "constant" or step == begin or index == len(self.steps) - 1:
            return self.values[index]
        end = self.steps[index + 1]
        share = (step - begin) / (end - begin)
        return BETWEEN[self.between](self.values[index], self.values[index + 1], share)


def piecewise(points: Mapping[int, float], between: str = "constant") -> Schedule:
    """The given values at the given steps, and between two of them a step, a line or half a cosine.

    Constant pieces, each held until the next, are torch's ``MultiStepLR`` with the values written out;
    lines and cosines are optax's ``piecewise_interpolate_schedule``. The first value holds before its
    step, the last after it.

    Args:
        points: step -> value, smallest step first.
        between: constant, linear or cosine.

    Raises:
        OptionError: there is no point, a step is not an integer of at least 0, the steps are not sorted,
            a value is not a finite number, or `between` is another.

    >>> [piecewise({0: 1.0, 2: 0.5, 4: 0.25})(k) for k in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    >>> [piecewise({0: 1.0, 2: 0.5, 4: 0.0}, between="linear")(k) for k in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if not isinstance(points, Mapping) or not points:
        raise OptionError(f"piecewise: points is {points!r}; it must map at least one step to a value.")
    steps = tuple(count("piecewise", "a step of points", step) for step in points)
    values = tuple(number("piecewise", f"points[{step}]", value) for step, value in points.items())
    require_sorted("piecewise", "points", steps)
    choice("piecewise", "between", between, ("constant", *BETWEEN))
    text = spelled(piecewise, points=dict(zip(steps, values, strict=True)), between=between)
    return _Pieces(text, steps, values, between)
