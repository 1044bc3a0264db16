"""Apply wrappers to a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftrain.errors import ComposeError
from ftrain.optim.schedules.call import Call
from ftrain.step.step import Step
from ftrain.step.wrapper import S


def compose(step: S, *wrappers: Callable[[Any], Any]) -> S:
    """Apply wrappers to a step, the first one innermost.

    Raises:
        ComposeError: when an argument is not a wrapper.
    """
    for number, wrap in enumerate[Any](wrappers, start=1):
        if not callable(wrap) or isinstance(wrap, Step | Call):
            argument = "a Step" if isinstance(wrap, Step) else repr(wrap)
            raise ComposeError(
                f"compose: argument {number} is {argument}; needs a wrapper. The step comes first, then each wrapper: "
                "compose(step, ft.clip(1.0), ft.ema(0.999))"
            )
        step = wrap(step)
        if not callable(step):
            raise ComposeError(f"compose: argument {number} returned {step!r}; a wrapper returns a step")
    return step
