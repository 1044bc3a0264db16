"""A value that is reduced when a metric has stopped improving: torch's ``ReduceLROnPlateau`` as a pure state."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ftrain.errors import require_choice, require_positive_number, whole_number
from ftrain.optim.schedules.checks import not_negative, number_that_is


@dataclass(frozen=True)
class Plateau:
    """The state of `reduce_on_plateau`: its options, and what it remembers of past evaluations.

    Args:
        value: the current value.
        best: the best metric so far.
        bad: number of evaluations in a row that did not improve on it.
        waiting: number of remaining evaluations of the cooldown, which do not count as bad.
    """

    value: float
    factor: float
    patience: int
    mode: str
    threshold: float
    threshold_mode: str
    cooldown: int
    end: float
    eps: float
    best: float
    bad: int = 0
    waiting: int = 0

    def after(self, metric: float) -> Plateau:
        """Return the state after one more evaluation. A metric that is NaN is not better."""
        is_better = self._is_better(float(metric))
        bad = 0 if is_better or self.waiting else self.bad + 1
        is_reduced = bad > self.patience
        reduced = max(self.value * self.factor, self.end)
        return replace(
            self,
            value=reduced if is_reduced and self.value - reduced > self.eps else self.value,
            best=float(metric) if is_better else self.best,
            bad=0 if is_reduced else bad,
            waiting=self.cooldown if is_reduced else max(self.waiting - 1, 0),
        )

    def _is_better(self, metric: float) -> bool:
        margin = -self.threshold if self.mode == "min" else self.threshold
        bound = self.best * (1.0 + margin) if self.threshold_mode == "rel" else self.best + margin
        return metric < bound if self.mode == "min" else metric > bound


def reduce_on_plateau(
    value: float = 1.0,
    *,
    factor: float = 0.1,
    patience: int = 10,
    mode: Literal["min", "max"] = "min",
    threshold: float = 1e-4,
    threshold_mode: Literal["rel", "abs"] = "rel",
    cooldown: int = 0,
    end: float = 0.0,
    eps: float = 1e-8,
) -> Plateau:
    """Return the state of a value that is multiplied by a factor when a metric has not improved for some evaluations.

    The values are those of ``torch.optim.lr_scheduler.ReduceLROnPlateau``, to the last bit. They depend on metrics and
    not on the step alone, so this is not a schedule: ``plateau = plateau.after(loss)`` returns the next state, and
    ``plateau.value`` is its value. `ftrain.plateau` does this in `ftrain.fit`.

    Args:
        value: the first value. Default: 1, the factor of an `ftrain.optim.adjustable` optimizer.
        factor: what the value is multiplied by, in (0, 1).
        patience: evaluations in a row without improvement before a reduction.
        mode: ``"min"`` if less is better, ``"max"`` if more is.
        threshold: the smallest change that is an improvement.
        threshold_mode: ``"rel"`` if `threshold` is a share of the best metric, ``"abs"`` if it is a difference.
        cooldown: evaluations after a reduction that do not count.
        end: the smallest value, torch's ``min_lr``.
        eps: the smallest reduction; smaller ones are left out.

    Raises:
        OptionError: a number is out of its range, or a mode is none of these.

    >>> plateau = reduce_on_plateau(0.1, factor=0.5, patience=1)
    >>> for loss in (1.0, 0.9, 0.9, 0.9):
    ...     plateau = plateau.after(loss)
    >>> plateau.value
    0.05
    """
    name = "reduce_on_plateau"
    return Plateau(
        value=require_positive_number(name, "value", value),
        factor=number_that_is("in (0, 1)", lambda number: 0 < number < 1)(name, "factor", factor),
        patience=whole_number(name, "patience", patience),
        mode=require_choice(name, "mode", mode, ("min", "max")),
        threshold=not_negative(name, "threshold", threshold),
        threshold_mode=require_choice(name, "threshold_mode", threshold_mode, ("rel", "abs")),
        cooldown=whole_number(name, "cooldown", cooldown),
        end=not_negative(name, "end", end),
        eps=not_negative(name, "eps", eps),
        best=math.inf if mode == "min" else -math.inf,
    )
