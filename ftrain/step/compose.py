"""How a step is made: `train_step` of a loss and an optimizer, and `compose` of a step and wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftrain.errors import ComposeError
from ftrain.step.loss_forms import adapt
from ftrain.step.step import Step
from ftrain.step.wrapper import S
from ftrain.tree.name_patterns import Mask
from ftrain.types import Loss, Optimizer


def compose(step: S, *wrappers: Callable[[Any], Any]) -> S:
    """Apply wrappers to a step, the first one innermost.

    Raises:
        ComposeError: for anything among them that is not a wrapper.
    """
    for position, wrap in enumerate(wrappers):
        if not callable(wrap) or isinstance(wrap, Step):
            raise ComposeError(f"compose: argument {position + 1} is {wrap!r}; needs a wrapper such as ft.clip(1.0)")
        step = wrap(step)
    return step


def train_step(
    loss_fn: Callable[..., Any] | Loss,
    optimizer: Optimizer,
    *,
    trainable: Mask | None = None,
    allow_unused: bool = False,
) -> Step:
    """Return the step that follows the gradient of a loss with an optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch)`` as `ftrain.step.loss_forms.adapt` describes it, or what
            `ftrain.from_module` made.
        optimizer: from `ftrain.optim`.
        trainable: which parameters train, as ``(name, leaf) -> bool`` or a list of name patterns; the
            others are frozen. Without it all do, of a module those that require a gradient; under `lora` none
            but the adapters.
        allow_unused: give parameters that the loss does not use a zero gradient instead of an error.

    Raises:
        LossError: when `loss_fn` cannot be called as a loss.
        ComposeError: when `optimizer` is none of ours.
    """
    if not isinstance(optimizer, Optimizer):
        raise ComposeError(
            f"train_step: the optimizer is {type(optimizer).__name__}; needs one of ftrain.optim, such as "
            "ft.optim.adamw(3e-4), which keeps its state in the TrainState"
        )
    return Step(adapt(loss_fn), optimizer, trainable, allow_unused)
