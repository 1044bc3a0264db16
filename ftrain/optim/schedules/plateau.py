"""A value that falls when a metric has stopped getting better: a small pure state, fed by evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ftrain.errors import OptionError
from ftrain.optim.schedules.inputs import choice, count, number, positive


@dataclass(frozen=True)
class Plateau:
    """What `reduce_on_plateau` makes: the value, and what it must remember.

    Args:
        value: now.
        best: the best metric so far.
        bad: how many in a row were not better.
        waiting: for how many more these do not count, since the value has just been reduced.
    """

    value: float
    factor: float
    patience: int
    mode: str
    threshold: float
    relative: bool
    cooldown: int
    end: float
    least: float
    best: float
    bad: int = 0
    waiting: int = 0

    def after(self, metric: float) -> Plateau:
        """Return the state after one more evaluation; a metric that is NaN is not better than another."""
        better = self._better(float(metric))
        bad = 0 if better or self.waiting else self.bad + 1
        reduce = bad > self.patience
        lower = max(self.value * self.factor, self.end)
        return replace(
            self,
            value=lower if reduce and self.value - lower > self.least else self.value,
            best=float(metric) if better else self.best,
            bad=0 if reduce else bad,
            waiting=self.cooldown if reduce else max(self.waiting - 1, 0),
        )

    def _better(self, metric: float) -> bool:
        lower = self.mode == "min"
        if self.relative:
            bound = self.best * (1.0 - self.threshold if lower else 1.0 + self.threshold)
        else:
            bound = self.best - self.threshold if lower else self.best + self.threshold
        return metric < bound if lower else metric > bound


def reduce_on_plateau(
    value: float = 1.0,
    *,
    factor: float = 0.1,
    patience: int = 10,
    mode: str = "min",
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    end: float = 0.0,
    eps: float = 1e-8,
) -> Plateau:
    """A value that is multiplied by a factor when a metric has not got better for a while.

    The values are those of ``torch.optim.lr_scheduler.ReduceLROnPlateau``, to the last bit. It depends on evaluations
    and not on the step alone, so that it is no schedule: ``plateau = plateau.after(loss)`` is the next state, and
    ``plateau.value`` the value. `ftrain.plateau` lets `ftrain.fit` do that.

    Args:
        value: at first; 1, for the factor of an `ftrain.optim.adjustable`.
        factor: what it is multiplied by, in (0, 1).
        patience: evaluations in a row that may be no better.
        mode: ``"min"`` when less is better, ``"max"`` when more is.
        threshold: by how much a metric must be better than the best.
        threshold_mode: ``"rel"`` for a share of the best one, ``"abs"`` for a difference.
        cooldown: evaluations after a reduction that do not count.
        end: the least value, torch's ``min_lr``.
        eps: reductions that are smaller are not made.

    Raises:
        OptionError: for a number out of its range, or another mode.

    >>> plateau = reduce_on_plateau(0.1, factor=0.5, patience=1)
    >>> for loss in (1.0, 0.9, 0.9, 0.9):
    ...     plateau = plateau.after(loss)
    >>> plateau.value
    0.05
    """
    name = "reduce_on_plateau"
    choice(name, "mode", mode, ("min", "max"))
    choice(name, "threshold_mode", threshold_mode, ("rel", "abs"))
    positive(name, "value", value)
    if not 0.0 < number(name, "factor", factor) < 1.0:
        raise OptionError(f"{name}: factor is {factor!r}; it must be in (0, 1).")
    count(name, "patience", patience)
    count(name, "cooldown", cooldown)
    for argument, given in (("threshold", threshold), ("end", end), ("eps", eps)):
        if number(name, argument, given) < 0:
            raise OptionError(f"{name}: {argument} is {given!r}; it must be at least 0.")
    best = math.inf if mode == "min" else -math.inf
    return Plateau(float(value), factor, patience, mode, threshold, threshold_mode == "rel", cooldown, end, eps, best)
