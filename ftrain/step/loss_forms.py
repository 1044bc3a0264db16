"""Convert a loss function, and the values that it returns, from the short forms that users write."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import backends, tree
from ftrain.errors import LossError
from ftrain.types import Loss, LossOutput, Mean, Metrics, PyTree, replace

FORMS = "a 0-d tensor or Mean, alone or as (loss, metrics) or (loss, metrics, buffers)"
MEAN_FORM = "0-d tensors as total and weight, such as torch.tensor(4.0) for the number 4"


def adapt(loss_fn: Callable[..., Any] | Loss, function: str = "train_step") -> Loss:
    """Convert a loss function to a `Loss`.

    It is ``loss_fn(params, batch)``, which may also take ``rng=`` (a key of `ftrain.random`) and ``buffers=`` by
    keyword, and returns a 0-d tensor or `Mean`, alone or as ``(loss, metrics)`` or ``(loss, metrics, buffers)``. A 0-d
    tensor is a mean with weight 1. Raises a LossError, in the name of `function`, if it cannot be called like this.
    """
    if isinstance(loss_fn, Loss):
        return loss_fn
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    name = "loss" if name == "<lambda>" else name
    accepted = _accepted(loss_fn, name, function)
    takes_rng, takes_buffers = "rng" in accepted, "buffers" in accepted

    def full(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        keywords: dict[str, Any] = {}
        if takes_rng:
            keywords["rng"] = rng
        if takes_buffers:
            keywords["buffers"] = buffers
        return normalise(loss_fn(params, batch, **keywords), buffers, name)

    return Loss(full, name, needs_rng=takes_rng)


def _accepted(loss_fn: Callable[..., Any], name: str, function: str) -> list[str]:
    """Return which of the arguments `rng` and `buffers` a loss takes."""
    if not callable(loss_fn):
        raise LossError(f"{function}: the loss is {loss_fn!r}; needs a function (params, batch) -> loss")
    if isinstance(loss_fn, nn.Module):
        raise LossError(
            f"{function}: the loss is the module {type(loss_fn).__name__}; convert it with "
            "ft.from_module(module, criterion)"
        )
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # builtins
        return []
    accepted = [key for key in ("rng", "buffers") if key in signature.parameters]
    try:
        signature.bind("params", "batch", **dict.fromkeys(accepted))
    except TypeError as error:
        raise LossError(f"{function}: {name}{signature} cannot be called as {name}(params, batch): {error}") from error
    return accepted


def normalise(returned: Any, buffers: PyTree, name: str) -> LossOutput:
    """Return the results of a loss as ``(Mean, metrics, buffers)``. Raises a LossError if they have no form of `FORMS`.

    `buffers` are those that the loss got; they are returned if the loss returned none.
    """
    loss, metrics, new_buffers = returned, {}, buffers
    if isinstance(returned, tuple):
        if len(returned) not in (2, 3):
            raise LossError(f"{name}: returned a tuple of length {len(returned)}; needs {FORMS}")
        loss, metrics, new_buffers = (*returned, buffers)[:3]
    if not isinstance(metrics, dict):
        raise LossError(f"{name}: returned metrics of type {type(metrics).__name__}; needs a dict of tensors or Means")
    if "loss" in metrics:
        raise LossError(f"{name}: a metric is called 'loss', the name of the loss itself; rename it")
    if isinstance(loss, Tensor) and loss.ndim == 0:
        loss = Mean(loss, torch.ones_like(loss, dtype=torch.promote_types(loss.dtype, torch.float32)), plain=True)
    if not isinstance(loss, Mean):
        hint = ", such as its ['loss']" if isinstance(loss, Mapping) and "loss" in loss else ""
        raise LossError(f"{name}: returned {tree.describe(loss)}; needs {FORMS}{hint}")
    for part in (loss.total, loss.weight):
        if not isinstance(part, Tensor) or part.ndim:
            raise LossError(f"{name}: returned a Mean of {tree.describe(part)}; needs {MEAN_FORM}")
    for metric, value in metrics.items():
        parts: tuple[Any, ...] = (value.total, value.weight) if isinstance(value, Mean) else ()
        if not all(isinstance(part, Tensor) for part in parts):
            described = " and ".join(map(tree.describe, parts))
            raise LossError(f"{name}: the metric {metric!r} is a Mean of {described}; needs {MEAN_FORM}")
    return loss, metrics, new_buffers


def report(metrics: Metrics, function: str, **more: Any) -> Metrics:
    """Return the metrics of a loss with more added. Raises a LossError if the loss reports one of the same name."""
    for name in more:
        if name in metrics:
            raise LossError(f"{function}: a metric is called {name!r}, which is a metric of the step; rename it")
    return {**metrics, **more}


def zero_if_empty(mean: Mean) -> Mean:
    """Return a mean that can be added to others: the total is 0 if the weight is 0, even if it was NaN."""
    is_empty = (mean.weight == 0).to(mean.total.device)
    return replace(mean, total=summable(mean.total.masked_fill(is_empty, 0)), weight=summable(mean.weight))


def as_float(number: Tensor) -> Tensor:
    """Return a number from which a mean can be computed: integers as floats of the widest dtype of their device.

    Not float32 if there is float64: float32 holds all integers up to 2**24 only.
    """
    is_integer = not (number.is_floating_point() or number.is_complex()) and number.dtype != torch.bool
    return number.to(backends.widest(number.device)) if is_integer else number


def summable(number: Tensor) -> Tensor:
    """Return a number in a dtype of at least 32 bits, because a sum of many numbers in fewer bits is wrong."""
    is_integer = not (number.is_floating_point() or number.is_complex())
    return number.to(torch.promote_types(number.dtype, torch.int64 if is_integer else torch.float32))
