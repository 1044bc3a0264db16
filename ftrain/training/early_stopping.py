"""Early stopping, and learning rates that follow a metric: pure functions of the history, called after evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, SupportsFloat, TypeAlias, TypeVar

from ftrain.errors import ComposeError, OptionError, require_choice, require_positive, require_range, warn_of_mode
from ftrain.optim import adjust
from ftrain.optim.schedules.plateau import Plateau
from ftrain.training.history import History, column

Stop: TypeAlias = Callable[[History], str]
"""``history -> reason to stop, or ""``."""

Adapt: TypeAlias = Callable[[Any, History], Any]
"""``(state, history) -> state``, the same one when there is nothing to change."""

S = TypeVar("S")


def _folded(function: str, name: str, first: S, advance: Callable[[S, float], S]) -> Callable[[History], S]:
    """Return ``history -> advance(... advance(first, value) ..., value)`` over the values of a metric.

    A history that has grown since the last call is read from there on. Raises as `column`, also for no number.
    """
    seen: History | None = None
    count, result = 0, first

    def fold(history: History) -> S:
        nonlocal seen, count, result
        if history is not seen or not 0 < count <= len(history):
            column(function, name, history)
            seen, count, result = history, 0, first
        for record in history[count:]:
            value: Any = record.get(name, 0.0)
            if not isinstance(value, SupportsFloat):
                raise OptionError(f"{function}: {name!r} is {value!r:.100}; needs one number, which evaluate= returns")
            count, result = count + 1, advance(result, float(value)) if name in record else result
        return result

    return fold


def patience(name: str, count: int = 3, *, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> Stop:
    """Return a `stop` for `fit`: stop when a metric has not improved in `count` evaluations in a row.

    A pure function of the history, which is saved in checkpoints: a run that resumes stops after the same step.

    Args:
        name: the metric, as the history has it, such as ``"eval_loss"``.
        count: number of evaluations without an improvement.
        mode: ``"min"`` when less is better, ``"max"`` when more is.
        min_delta: a smaller improvement does not count; at least 0.

    Raises:
        OptionError: for a count that is not positive, a negative `min_delta`, or another mode; from `fit`, when there
            is no such metric, or it is no number.
    """
    require_positive("patience", "count", count)
    require_choice("patience", "mode", mode, ("min", "max"))
    require_range("patience", "min_delta", min_delta, 0.0)
    warn_of_mode("patience", name, mode)
    sign = 1.0 if mode == "min" else -1.0

    def advance(before: tuple[float, int], value: float) -> tuple[float, int]:
        best, without_improvement = before
        return (sign * value, 0) if sign * value < best - min_delta else (best, without_improvement + 1)

    fold = _folded("patience", name, (float("inf"), 0), advance)
    return lambda history: f"patience({name})" if fold(history)[1] >= count else ""


def plateau(name: str, rule: Plateau, factors: str = "*lr") -> Adapt:
    """Return an `adapt` for `fit`: lower the learning rate when a metric has stopped improving.

    The optimizer must be `ftrain.optim.adjustable`. A pure function of the history, which is saved in checkpoints: a
    run that resumes has the same rates.

    Args:
        name: the metric, as the history has it, such as ``"eval_loss"``.
        rule: from `ftrain.schedules.reduce_on_plateau`; its value is the factor of the scheduled rate.
        factors: pattern of the names of the scheduled values to multiply. Default: every ``lr``.

    Raises:
        ComposeError: for another rule; from `fit`, a StructureError when the optimizer is not adjustable, and an
            OptionError when there is no such metric, or it is no number.
    """
    if not isinstance(rule, Plateau):
        raise ComposeError(f"plateau: the rule is {rule!r}; needs ft.schedules.reduce_on_plateau(...)")
    warn_of_mode("plateau", name, rule.mode)

    fold = _folded("plateau", name, rule, Plateau.after)
    return lambda state, history: adjust(state, {factors: fold(history).value})
