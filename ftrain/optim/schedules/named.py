"""The learning-rate schedules of transformers, by their names and options there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ftrain.errors import OptionError, require_choice, whole_number
from ftrain.optim.schedules.checks import number
from ftrain.optim.schedules.combine import ahead, chain, scale
from ftrain.optim.schedules.phases import piecewise, warmup_stable_decay
from ftrain.optim.schedules.warmup_and_decay import (
    constant,
    warmup_constant,
    warmup_cosine,
    warmup_cosine_restarts,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
)
from ftrain.types import Schedule


def named(name: str, peak: float, warmup: int = 0, total: int | None = None, **options: Any) -> Schedule:
    """Return the schedule that transformers calls `name` in its ``lr_scheduler_type``.

    Args:
        name: constant, constant_with_warmup, linear, cosine, cosine_with_restarts, cosine_with_min_lr,
            cosine_warmup_with_min_lr, polynomial, inverse_sqrt or warmup_stable_decay, as a string or a
            ``SchedulerType``.
        peak: the learning rate of the optimizer.
        warmup: num_warmup_steps; as in transformers, "constant" ignores it.
        total: num_training_steps; not needed by constant, constant_with_warmup and inverse_sqrt.
        options: lr_scheduler_kwargs: num_cycles, lr_end and power, min_lr or min_lr_rate, warmup_lr_rate, timescale,
            num_decay_steps, num_stable_steps, warmup_type, decay_type and min_lr_ratio.

    Raises:
        OptionError: an unknown name or option, or a value that the schedule does not take.

    >>> named("cosine_with_min_lr", 3e-4, warmup=100, total=2000, min_lr=3e-5)
    warmup_cosine(3e-4, 100, 2000, end=3e-5)
    >>> named("linear", 5e-5, total=1000)
    warmup_linear(5e-5, 0, 1000)
    """
    name = getattr(name, "value", name)  # of a member of transformers' enum
    if name in ("reduce_lr_on_plateau", "greedy"):
        raise OptionError(
            f"named: {name!r} depends on evaluations and not on the step alone; use schedules.reduce_on_plateau(...) "
            "with fit(..., adapt=ft.plateau(metric, it)), or a function of your own as fit(..., adapt=...)."
        )
    function = _FUNCTIONS[require_choice("named", "name", name, [*_FUNCTIONS])]
    known = inspect.getfullargspec(function).kwonlyargs
    for option in options:
        if option not in known:
            choices = ", ".join(known) or "none"
            raise OptionError(f"named: {option!r} is not an option of {name!r}, which takes {choices}.")
    return function(peak, warmup, total, **options)


def _cosine_with_min_lr(
    peak: float,
    warmup: int,
    total: int,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Schedule:
    share = _end_over_peak(peak, min_lr, min_lr_rate)
    if min_lr is not None:
        return warmup_cosine(peak, warmup, total, end=min_lr, waves=num_cycles)
    return scale(warmup_cosine(1.0, warmup, total, end=share, waves=num_cycles), peak)


def _end_over_peak(peak: float, min_lr: float | None, min_lr_rate: float | None) -> float:
    if min_lr is not None and min_lr_rate is None:
        peak = number("named", "peak", peak)
        return number("named", "min_lr", min_lr) / peak if peak else 0.0
    if min_lr is None and min_lr_rate is not None:
        return min_lr_rate
    raise OptionError(f"named: found min_lr={min_lr!r} and min_lr_rate={min_lr_rate!r}; needs one of them.")


def _cosine_warmup_with_min_lr(
    peak: float,
    warmup: int,
    total: int,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Schedule:
    end = _end_over_peak(peak, min_lr, min_lr_rate)
    whole = ahead(warmup_cosine(1.0, warmup, total, end=end, waves=num_cycles))
    if warmup_lr_rate is not None and warmup:
        rise = piecewise({0: warmup_lr_rate, max(warmup - 1, 1): 1.0}, between="linear")
    elif warmup == total:
        # The last step must have the peak, and warmup_cosine has `end` there.
        rise = ahead(warmup_constant(1.0, warmup))
    else:
        return scale(whole, peak)
    fall = ahead(warmup_cosine(1.0, 0, total - warmup, end=end, waves=num_cycles))
    return scale(chain([rise, fall], [warmup]), peak)


def _warmup_stable_decay(
    peak: float,
    warmup: int,
    total: int,
    *,
    num_decay_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
) -> Schedule:
    decay = whole_number("named", "num_decay_steps", num_decay_steps)
    if num_stable_steps is not None:
        stable = whole_number("named", "num_stable_steps", num_stable_steps)
        total = whole_number("named", "warmup", warmup) + stable + decay
    shapes: dict[str, Any] = {"warmup_shape": warmup_type, "decay_shape": decay_type}
    if not min_lr_ratio:
        return warmup_stable_decay(peak, warmup, total, decay, **shapes)
    return scale(warmup_stable_decay(1.0, warmup, total, decay, min_lr_ratio, start=min_lr_ratio, **shapes), peak)


# (peak, warmup, total, *, options) -> schedule.
_FUNCTIONS: dict[str, Callable[..., Schedule]] = {
    "constant": lambda peak, warmup, total: constant(peak),
    "constant_with_warmup": lambda peak, warmup, total: warmup_constant(peak, warmup),
    "linear": warmup_linear,
    "cosine": lambda peak, warmup, total, *, num_cycles=0.5: warmup_cosine(peak, warmup, total, waves=num_cycles),
    "cosine_with_restarts": lambda peak, warmup, total, *, num_cycles=1: warmup_cosine_restarts(
        peak, warmup, total, num_cycles
    ),
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "polynomial": lambda peak, warmup, total, *, lr_end=1e-7, power=1.0: warmup_polynomial(
        peak, warmup, total, lr_end, power
    ),
    "inverse_sqrt": lambda peak, warmup, total, *, timescale=None: warmup_inverse_sqrt(peak, warmup, timescale),
    "warmup_stable_decay": _warmup_stable_decay,
}
