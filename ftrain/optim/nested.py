"""Shared code of optimizers that wrap other optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ftrain.errors import ComposeError
from ftrain.types import Optimizer, PyTree


def require_optimizer(function: str, name: str, optimizer: Any) -> Optimizer:
    """Return an optimizer that may be part of another one.

    Raises:
        ComposeError: it is not an optimizer, or it is adjustable: a step finds factors in the outermost optimizer only.
    """
    if not isinstance(optimizer, Optimizer):
        raise ComposeError(f"{function}: {name} is {optimizer!r}; needs an optimizer of ftrain.optim")
    if optimizer.factors is not None:
        raise ComposeError(f"{function}: {name} is {optimizer.text}; adjustable goes last: adjustable({function}(...))")
    return optimizer


def wrap_split(
    optimizer: Optimizer, wrap: Callable[[Optimizer], Optimizer]
) -> Callable[[PyTree, Sequence[Sequence[int]]], list[Optimizer]] | None:
    """Return the `Optimizer.split` of a wrapper that does the same for every group of parameters, if there is one."""
    split = optimizer.split
    if split is None:
        return None
    return lambda params, parts: [wrap(each) for each in split(params, parts)]
