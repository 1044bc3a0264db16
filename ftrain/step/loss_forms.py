"""The short forms in which a loss may be given and may return its values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import tree
from ftrain.errors import LossError
from ftrain.types import Loss, LossOutput, Mean, Metrics, PyTree

FORMS = "a 0-d tensor or Mean, alone or as (loss, metrics) or (loss, metrics, buffers)"


def adapt(loss_fn: Callable[..., Any] | Loss, function: str = "train_step") -> Loss:
    """Convert a loss function to its full form, a `Loss`.

    Args:
        loss_fn: ``loss_fn(params, batch)``, which may also take ``rng=`` (a key of `ftrain.random`) and
            ``buffers=`` by keyword, and returns a 0-d tensor or `Mean`, alone or as ``(loss, metrics)``
            or ``(loss, metrics, buffers)``. A 0-d tensor counts as a mean with weight one.
        function: the name of the calling function, for error messages.

    Raises:
        LossError: when `loss_fn` cannot be called like that.
    """
    if isinstance(loss_fn, Loss):
        return loss_fn
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    name = "loss" if name == "<lambda>" else name
    accepted = _accepted(loss_fn, name, function)

    def full(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        offered: dict[str, Any] = {"rng": rng, "buffers": buffers}
        return normalise(
            loss_fn(params, batch, **dict(zip(accepted, map(offered.get, accepted), strict=True))), buffers, name
        )

    return Loss(full, name, needs_rng="rng" in accepted)


def _accepted(loss_fn: Callable[..., Any], name: str, function: str) -> list[str]:
    """Return which of the arguments `rng` and `buffers` a loss takes."""
    if not callable(loss_fn):
        raise LossError(f"{function}: the loss must be a function (params, batch) -> loss, found {loss_fn!r}")
    if isinstance(loss_fn, nn.Module):
        raise LossError(
            f"{function}: the loss is the module {type(loss_fn).__name__}; make one of it with "
            "ft.from_module(module, criterion)"
        )
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # builtins
        return []
    try:
        signature.bind("params", "batch", **{key: None for key in ("rng", "buffers") if key in signature.parameters})
    except TypeError as error:
        raise LossError(f"{function}: {name}{signature} cannot be called as {name}(params, batch): {error}") from error
    return [key for key in ("rng", "buffers") if key in signature.parameters]


def normalise(returned: Any, buffers: PyTree, name: str) -> LossOutput:
    """Convert the value that a loss returned to the form (Mean, metrics, buffers).

    Raises:
        LossError: when it has none of the forms that `adapt` lists.
    """
    loss, metrics, new_buffers = returned, {}, buffers
    if isinstance(returned, tuple):
        if len(returned) not in (2, 3):
            raise LossError(f"{name}: returned a tuple of {len(returned)}; needs {FORMS}")
        loss, metrics, new_buffers = (*returned, buffers)[:3]
    if not isinstance(metrics, dict):
        raise LossError(f"{name}: metrics must be a dict of tensors or Means, found {type(metrics).__name__}")
    if "loss" in metrics:
        raise LossError(f"{name}: a metric is called 'loss', which is the name of the loss itself; rename it")
    if isinstance(loss, Tensor) and loss.ndim == 0:
        loss = Mean(loss, torch.ones_like(loss, dtype=torch.promote_types(loss.dtype, torch.float32)), plain=True)
    if not isinstance(loss, Mean):
        raise LossError(f"{name}: returned {tree.describe(loss)}; needs {FORMS}")
    for part in (loss.total, loss.weight):
        if not isinstance(part, Tensor) or part.ndim:
            raise LossError(f"{name}: total and weight of a Mean must be 0-d tensors, found {tree.describe(part)}")
    return loss, metrics, new_buffers


def report(metrics: Metrics, function: str, **more: Any) -> Metrics:
    """Add metrics to those that a loss reports.

    Raises:
        LossError: when the loss reports a metric of the same name.
    """
    for name in more:
        if name in metrics:
            raise LossError(f"{function}: a metric is called {name!r}, which the step reports itself; rename it")
    return {**metrics, **more}
