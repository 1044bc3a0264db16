"""What a run makes of its own history: when to stop, and what to change. Pure functions, told after evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from ftrain.errors import ComposeError, OptionError, require_positive
from ftrain.optim import adjust
from ftrain.optim.schedules.plateau import Plateau
from ftrain.training.history import History
from ftrain.tree.name_patterns import near
from ftrain.types import TrainState

Stop: TypeAlias = Callable[[History], str]
"""``history -> why to stop, or ""``."""

Adapt: TypeAlias = Callable[[Any, History], Any]
"""``(state, history) -> state``, the same one when there is nothing to change."""


def column(function: str, name: str, history: History) -> list[Any]:
    """Return the values of a metric.

    Raises:
        OptionError: when there are records, and none has it; listing the names that there are.
    """
    values: list[Any] = history[name]
    if not values and len(history):
        names = list(dict.fromkeys(key for record in history for key in record))
        names.sort(key=lambda key: key != f"eval_{name}")
        raise OptionError(
            f"{function}: nothing is recorded as {name!r}; there are {near(name, names)}. What evaluate= returns is "
            "recorded with eval_ before its name"
        )
    return values


def patience(name: str, count: int = 3, *, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> Stop:
    """Return a `stop` for `fit`: when a metric has not got better in `count` evaluations in a row.

    A pure function of the history, which a checkpoint holds, so that a run that goes on stops where it would have.

    Args:
        name: of the metric, as the history has it, such as ``"eval_loss"``.
        count: of evaluations.
        mode: ``"min"`` when less is better, ``"max"`` when more is.
        min_delta: by how much it must get better.

    Raises:
        OptionError: for a count that is not positive, or another mode; and from `fit`, at the first evaluation, when
            there is no metric of that name.
    """
    require_positive("patience", "count", count)
    if mode not in ("min", "max"):
        raise OptionError(f"patience: mode is {mode!r}; choices are min, max")
    sign = 1.0 if mode == "min" else -1.0

    def stop(history: History) -> str:
        best, waited = float("inf"), 0
        for value in column("patience", name, history):
            better = sign * value < best - min_delta
            best, waited = (sign * value, 0) if better else (best, waited + 1)
        return f"patience({name})" if waited >= count else ""

    return stop


def plateau(name: str, rule: Plateau, factors: str = "*lr") -> Adapt:
    """Return an `adapt` for `fit`: lower the learning rate when a metric has stopped getting better.

    The optimizer must be `ftrain.optim.adjustable`. A pure function of the history, which a checkpoint holds, so that
    a run that goes on has the rates that it would have had.

    Args:
        name: of the metric, as the history has it, such as ``"eval_loss"``.
        rule: from `ftrain.schedules.reduce_on_plateau`; its value is the factor of the scheduled rate.
        factors: pattern of the names of the scheduled values that it multiplies; every ``lr``, unless told.

    Raises:
        ComposeError: for another rule; and from `fit`, a StructureError when the optimizer is not adjustable, and an
            OptionError at the first evaluation when there is no metric of that name.
    """
    if not isinstance(rule, Plateau):
        raise ComposeError(f"plateau: the rule is {rule!r}; needs ft.schedules.reduce_on_plateau(...)")

    def adapt(state: TrainState, history: History) -> TrainState:
        now = rule
        for value in column("plateau", name, history):
            now = now.after(value)
        return adjust(state, {factors: now.value})

    return adapt
