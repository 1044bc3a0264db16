"""Decays by a factor: in steps of a staircase, or smoothly."""

from __future__ import annotations

from dataclasses import dataclass

from ftrain.optim.schedules.inputs import count, factor_of_decay, number
from ftrain.optim.schedules.text import Written, spelled
from ftrain.types import Schedule


@dataclass(frozen=True, repr=False)
class _Fall(Written):
    value: float
    factor: float
    steps: int
    stairs: bool

    def __call__(self, step: int) -> float:
        step = max(step, 0)
        return self.value * self.factor ** (step // self.steps if self.stairs else step / self.steps)


def step_decay(value: float, every: int, factor: float = 0.1) -> Schedule:
    """``value factor^floor(k / every)``: torch's ``StepLR``; `piecewise` falls at steps of your own.

    Raises:
        OptionError: `value` is not a finite number, `every` is not an integer of at least 1, or not
            ``0 < factor <= 1``.

    >>> [step_decay(1.0, 2, factor=0.5)(k) for k in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    value, every = number("step_decay", "value", value), count("step_decay", "every", every, least=1)
    factor = factor_of_decay("step_decay", "factor", factor)
    return _Fall(spelled(step_decay, value=value, every=every, factor=factor), value, factor, every, stairs=True)


def exponential(value: float, factor: float, steps: int = 1) -> Schedule:
    """``value factor^(k / steps)``: torch's ``ExponentialLR`` with `steps` at 1.

    Raises:
        OptionError: `value` is not a finite number, not ``0 < factor <= 1``, or `steps` is not an
            integer of at least 1.

    >>> [exponential(1.0, 0.25, steps=2)(k) for k in range(5)]
    [1.0, 0.5, 0.25, 0.125, 0.0625]
    """
    value, factor = number("exponential", "value", value), factor_of_decay("exponential", "factor", factor)
    steps = count("exponential", "steps", steps, least=1)
    text = spelled(exponential, value=value, factor=factor, steps=steps)
    return _Fall(text, value, factor, steps, stairs=False)
