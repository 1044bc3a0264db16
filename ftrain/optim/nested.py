"""What optimizers that are made of others ask of these."""

from __future__ import annotations

from typing import Any

from ftrain.errors import ComposeError
from ftrain.types import Optimizer


def require_optimizer(function: str, name: str, optimizer: Any) -> Optimizer:
    """Return what can be a part of another optimizer.

    Raises:
        ComposeError: when it is no optimizer, or one whose factors the step would not find inside of another.
    """
    if not isinstance(optimizer, Optimizer):
        raise ComposeError(f"{function}: {name} is {optimizer!r}; needs an optimizer of ftrain.optim")
    if optimizer.factors is not None:
        raise ComposeError(f"{function}: {name} is {optimizer.text}; adjustable goes last: adjustable({function}(...))")
    return optimizer
