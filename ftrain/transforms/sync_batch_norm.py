"""BatchNorm with the statistics of the examples of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ftrain.errors import ComposeError, LossError
from ftrain.parallel.batch_rows import current
from ftrain.parallel.mesh import Group
from ftrain.step.across_ranks import ranks_of
from ftrain.step.blocks import forwarding
from ftrain.step.wrapper import OnLoss, Wrapper, extend_scope, wrapper
from ftrain.types import Loss

NAME = "sync_batch_norm"
TORCH_FORWARDS = _BatchNorm.forward, nn.SyncBatchNorm.forward


@wrapper
def sync_batch_norm() -> Wrapper:
    """Let BatchNorm normalise by the mean and variance over the examples of all ranks of `sharded`.

    In a training step, every `torch.nn` BatchNorm that is in training mode uses the statistics of the whole batch (with
    `accumulate`, of the whole microbatch), in both passes and in its running statistics. Each layer waits for two
    all-reduces in the forward pass and one in the backward pass. Calls of ``F.batch_norm`` are not changed.

    Raises:
        ComposeError: from the step, for a loss without a module or without BatchNorm, or for a subclass of BatchNorm
            with its own forward.
        LossError: from the step, on every rank, for one value per channel in the whole batch, as torch raises it.
    """

    def wrap(loss: Loss) -> Loss:
        layers = _batch_norms(loss)

        def synchronised(training: bool) -> AbstractContextManager[None]:
            # Other wrappers of the loss may have replaced forwards, too.
            forwards = [(layer, partial(_forward, layer, layer.forward)) for layer in layers]
            return forwarding(forwards) if training else nullcontext()

        scope = extend_scope(loss, synchronised)
        return dataclasses.replace(loss, scope=scope, wrapper_texts=(*loss.wrapper_texts, NAME))

    def sends(step: Any) -> dict[str, str]:
        return {"loss": "all-reduce of statistics"} if ranks_of(step.wrappers) > 1 else {}

    return Wrapper(NAME, NAME, loss=OnLoss(wrap, order=2), sends=sends)


def _batch_norms(loss: Loss) -> list[nn.Module]:
    """Return the BatchNorm layers of the module of a loss.

    Raises a ComposeError if there are none, or if one has a forward that is not torch's.
    """
    modules = loss.module.named_modules() if loss.module is not None else ()
    layers = {name: module for name, module in modules if isinstance(module, _BatchNorm)}
    if not layers:
        raise ComposeError(
            f"{NAME}: {loss.text} has no torch.nn.BatchNorm; leave out {NAME}, or make the loss with ft.from_module of "
            "the module that has one"
        )
    for name, layer in layers.items():
        if type(layer).forward not in TORCH_FORWARDS:
            raise ComposeError(
                f"{NAME}: {name} is a {type(layer).__name__} with a forward of its own, which may compute more than "
                "torch's; put a torch.nn.BatchNorm and the rest into a module"
            )
    return list(layers.values())


def _forward(layer: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a BatchNorm layer; in training on several ranks, with the statistics of the examples of all of them.

    `forward` is what the layer runs otherwise. Raises a LossError for one value per channel in the whole batch.
    """
    rows = current()
    if rows is None or rows.ranks is None or rows.ranks.size == 1 or not layer.training:
        return forward(x)
    if rows.total == 1 and x.numel() == x.shape[1]:
        raise LossError(
            f"{NAME}: {layer} gets one value per channel, from the one example of all ranks, and the variance of one "
            "value is unknown; leave out the last, smaller batch (drop_last=True), or use fewer microbatches"
        )
    y, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
        rows.ranks, rows.length > 0, layer.eps, x, layer.weight, layer.bias
    )
    if layer.track_running_stats and layer.running_mean is not None:
        # As torch does, normalise by the biased variance, and track the unbiased one.
        _track(layer, mean, variance * (count / (count - 1)))
    return y  # type: ignore[no-any-return]


@torch.no_grad()
def _track(layer: Any, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as `torch.nn.BatchNorm1d` does."""
    layer.num_batches_tracked.add_(1)
    factor = layer.momentum if layer.momentum is not None else 1.0 / layer.num_batches_tracked.to(mean.dtype)
    for running, new in ((layer.running_mean, mean), (layer.running_var, variance)):
        running.copy_(running * (1 - factor) + new.to(running.dtype) * factor)


class _Normalise(torch.autograd.Function):
    """Normalise by mean and variance over the examples of all ranks; returns ``(y, mean, variance, count)``."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Group, has_examples: bool, eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        axes = [axis for axis in range(x.ndim) if axis != 1]
        counted = wide if has_examples else wide[:0]
        count = counted.new_full((1,), counted.numel() // x.shape[1])
        sums = ranks.sum(torch.cat([counted.sum(axes), count]))
        count = sums[-1]
        mean = sums[:-1] / count
        # From the differences: the mean of squares minus the square of the mean would lose precision.
        variance = ranks.sum((counted - _by_channel(mean, x)).square().sum(axes)) / count
        inverse_std = (variance + eps).rsqrt()
        scale = inverse_std if weight is None else inverse_std * weight
        y = (wide - _by_channel(mean, x)) * _by_channel(scale, x)
        if bias is not None:
            y = y + _by_channel(bias, x)
        ctx.save_for_backward(x, mean, inverse_std, count, weight)
        ctx.ranks, ctx.has_examples, ctx.has_bias = ranks, has_examples, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
        x, mean, inverse_std, count, weight = ctx.saved_tensors
        axes = [axis for axis in range(x.ndim) if axis != 1]
        grad_wide = grad.to(mean.dtype)
        normalised = (x.to(mean.dtype) - _by_channel(mean, x)) * _by_channel(inverse_std, x)
        sums = torch.cat([grad_wide.sum(axes), (grad_wide * normalised).sum(axes)])
        mean_grad, mean_product = (ctx.ranks.sum(sums) / count).chunk(2)
        centred = grad_wide
        if ctx.has_examples:  # Else its row is that of another rank, and does not enter mean and variance.
            centred = grad_wide - _by_channel(mean_grad, x) - normalised * _by_channel(mean_product, x)
        scale = inverse_std if weight is None else inverse_std * weight
        grad_x = centred * _by_channel(scale, x)
        grad_bias, grad_weight = sums.chunk(2)
        return (
            None,
            None,
            None,
            grad_x.to(x.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
        )


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return a value per channel in a shape that broadcasts with x, of shape (examples, channels, ...)."""
    return values.view(1, -1, *[1] * (x.ndim - 2))
