"""Early stopping, and learning rates that depend on a metric: pure functions of the history of a run."""

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
"""``(state, history) -> state``; the same state if nothing changes."""

S = TypeVar("S")


def _make_fold(function: str, name: str, initial: S, advance: Callable[[S, float], S]) -> Callable[[History], S]:
    """Return a function of a history: ``advance(... advance(initial, value) ..., value)`` over the values of a metric.

    It reads only the new records if the history has grown since the last call. It raises as `column` does, and an
    OptionError for a value that is not a number.
    """
    last_history: History | None = None
    count, result = 0, initial

    def fold(history: History) -> S:
        nonlocal last_history, count, result
        if history is not last_history or not 0 < count <= len(history):
            column(function, name, history)
            last_history, count, result = history, 0, initial
        for record in history[count:]:
            value: Any = record.get(name, 0.0)
            if not isinstance(value, SupportsFloat):
                raise OptionError(f"{function}: {name!r} is {value!r:.100}; needs one number, which evaluate= returns")
            if name in record:
                result = advance(result, float(value))
            count += 1
        return result

    return fold


def patience(name: str, count: int = 3, *, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> Stop:
    """Return a function for ``fit(stop=)`` that stops when a metric has not improved in `count` evaluations in a row.

    It is a pure function of the history, which checkpoints contain, so a run that resumes stops after the same step.

    Args:
        name: the metric, as the history has it, such as ``"eval_loss"``.
        count: number of evaluations without an improvement.
        mode: ``"min"`` when less is better, ``"max"`` when more is.
        min_delta: a smaller improvement does not count; at least 0.

    Raises:
        OptionError: `count` is not positive, `min_delta` is negative, or `mode` is neither of the two; from `fit`, if
            there is no such metric, or it is not a number.
    """
    require_positive("patience", "count", count)
    require_choice("patience", "mode", mode, ("min", "max"))
    require_range("patience", "min_delta", min_delta, 0.0)
    warn_of_mode("patience", name, mode)
    sign = 1.0 if mode == "min" else -1.0

    def advance(result: tuple[float, int], value: float) -> tuple[float, int]:
        best, without_improvement = result
        return (sign * value, 0) if sign * value < best - min_delta else (best, without_improvement + 1)

    fold = _make_fold("patience", name, (float("inf"), 0), advance)

    def stop(history: History) -> str:
        _, without_improvement = fold(history)
        return f"patience({name})" if without_improvement >= count else ""

    return stop


def plateau(name: str, rule: Plateau, factors: str = "*lr") -> Adapt:
    """Return a function for ``fit(adapt=)`` that lowers the learning rate when a metric has stopped improving.

    The optimizer must be `ftrain.optim.adjustable`. It is a pure function of the history, which checkpoints contain, so
    a run that resumes has the same rates.

    Args:
        name: the metric, as the history has it, such as ``"eval_loss"``.
        rule: from `ftrain.schedules.reduce_on_plateau`; its value is the factor of the scheduled rate.
        factors: pattern of the names of the scheduled values to multiply. Default: every ``lr``.

    Raises:
        ComposeError: `rule` is not a `Plateau`; from `fit`, a StructureError if the optimizer is not adjustable, and an
            OptionError if there is no such metric, or it is not a number.
    """
    if not isinstance(rule, Plateau):
        raise ComposeError(f"plateau: the rule is {rule!r}; needs ft.schedules.reduce_on_plateau(...)")
    warn_of_mode("plateau", name, rule.mode)

    fold = _make_fold("plateau", name, rule, Plateau.after)
    return lambda state, history: adjust(state, {factors: fold(history).value})
