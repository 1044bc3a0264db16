"""Cross-entropy of the logits of a linear layer, without all logits in memory at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ftrain.errors import LossError, require_positive, require_range
from ftrain.losses.inputs import (
    at_least_float32,
    require_floating,
    require_ignore_index,
    require_indices,
    require_real,
    require_tensor,
    weight_of_labels,
)
from ftrain.tree import describe
from ftrain.types import Mean

NAME = "linear_cross_entropy"


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    chunk: int | None = None,
) -> Mean:
    """Cross-entropy of the logits ``hidden @ weight.T + bias``, which are never in memory all at once.

    Value and gradients are those of `cross_entropy` on these logits. Rows are processed in chunks: the logits of a
    chunk become their own gradient ``softmax(logits) - onehot(label)`` in place, so apart from inputs and gradients
    only the logits of one chunk are in memory, and a copy of the weight under autocast, or on a GPU whose matmuls need
    another number of classes. The gradients are computed with the loss and only scaled in the backward pass, with as
    many matmuls as the plain loss has; without gradients only the loss is computed.

    Under `torch.autocast` matmuls are in its dtype, as those of `torch.nn.Linear` are; the softmax and the sums over
    chunks are in float32 at least. A gradient has the dtype of its input. It can be differentiated once, and not under
    the transforms of `torch.func`.

    Args:
        hidden: (..., width), floating point; the input of the last layer. Rows whose label is ignored may hold
            anything, infinite and NaN included: they add nothing to the loss, and their gradient is 0.
        weight: (classes, width), like `torch.nn.Linear.weight` or that of a tied `torch.nn.Embedding`;
            with the dtype of `hidden`, except under autocast.
        labels: (...), integers in ``[0, classes)``, or `ignore_index`.
        bias: (classes,), of the dtype of `weight`.
        ignore_index: the label of rows to leave out.
        label_smoothing: the share of probability, in [0, 1], spread evenly over the classes.
        class_weight: (classes,), floating point; `weight` of `cross_entropy`. Not differentiated.
        chunk: the number of rows in a chunk. Default: a power of two whose logits take at most 64 MiB, or 512 MiB on a
            device that queues its work (a GPU), or an eighth of the memory of `weight` if that is more.

    Raises:
        LossError: a shape or a dtype is not as above; for a derivative in forward mode.
        OptionError: the smoothing, the chunk or `ignore_index` is not as above.

    Source: Hsu et al. 2024, https://arxiv.org/abs/2410.10989 (gradients with the loss, by chunks);
    Wijmans et al. 2024, https://arxiv.org/abs/2411.09009.

    >>> hidden, weight, labels = torch.randn(2, 3, 8), torch.zeros(5, 8), torch.tensor([[0, 1, 2], [3, -100, -100]])
    >>> loss = linear_cross_entropy(hidden, weight, labels)
    >>> float(loss.weight), round(float(loss), 4)
    (4.0, 1.6094)
    """
    dtype = _matmul_dtype(hidden, weight)
    _require_shapes(hidden, weight, labels, bias)
    require_ignore_index(NAME, ignore_index)
    require_range(NAME, "label_smoothing", label_smoothing, 0.0, 1.0, closed=True)
    if chunk is not None:
        require_positive(NAME, "chunk", chunk)
    wide = at_least_float32(dtype)
    if class_weight is not None:
        require_real(NAME, class_weight)
        if class_weight.shape != weight.shape[:1]:
            raise LossError(
                f"{NAME}: class_weight is {describe(class_weight)}; it must have shape {tuple(weight.shape[:1])}."
            )
        class_weight = class_weight.detach().to(wide)
    labels = labels.long().reshape(-1)
    options = class_weight, ignore_index, float(label_smoothing), chunk, dtype
    rows = hidden.reshape(-1, hidden.shape[-1])
    requires_grad = any(tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
    if torch.is_grad_enabled() and requires_grad:
        total = _Loss.apply(rows, weight, bias, labels, *options)  # type: ignore[no-untyped-call]
    else:
        _require_no_tangent(rows, weight, bias)
        total = _losses_and_gradients(rows, weight, bias, labels, *options, [False] * 3)[0]
    return Mean(total, weight_of_labels(labels, ignore_index, class_weight, wide))


def _losses_and_gradients(*inputs: Any) -> Any:
    # Imported when it is used: registering the operation takes as long as importing ten files.
    from ftrain.losses.chunked import losses_and_gradients

    return losses_and_gradients(*inputs)


def _require_no_tangent(*inputs: Tensor | None) -> None:
    """Check that no input has a tangent of forward mode. Raises a LossError if one has."""
    # Torch would use a tangent of zero for an operation without a forward-mode derivative, without an error.
    if torch.compiler.is_compiling():
        return
    tensors = [tensor for tensor in inputs if tensor is not None]
    if any(unpack_dual(tensor).tangent is not None for tensor in tensors):  # type: ignore[no-untyped-call]
        raise LossError(
            f"{NAME}: has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); use cross_entropy on "
            "the logits."
        )


class _Loss(torch.autograd.Function):
    """The sum of the losses, whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        total: Tensor
        total, *grads = _losses_and_gradients(*inputs, list(ctx.needs_input_grad[:3]))
        ctx.save_for_backward(*inputs[:5])
        ctx.options, ctx.grads = inputs[5:], grads
        return total

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise LossError(
                f"{NAME}: the gradient is to be differentiated again (create_graph=True), which needs all logits; "
                "use cross_entropy on the logits."
            )
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            # A second backward pass: the first one returned the gradients, scaled in place.
            _, *grads = _losses_and_gradients(*ctx.saved_tensors, *ctx.options, list(ctx.needs_input_grad[:3]))
        # In place, since they may be large. Autograd casts each to the dtype of its input.
        scaled = [
            grad.mul_(cotangent) if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)
        ]
        return (*scaled, *[None] * (len(ctx.needs_input_grad) - 3))


def _matmul_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which ``hidden @ weight.T`` is computed."""
    require_floating(NAME, "hidden states", hidden)
    require_floating(NAME, "weights", weight)
    device = hidden.device.type
    # Autocast does not change float64.
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise LossError(
            f"{NAME}: hidden is {describe(hidden)} and weight {describe(weight)}; they must have one dtype, "
            "or be under autocast. Convert one of them."
        )
    return hidden.dtype


def _require_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise LossError(
            f"{NAME}: hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they must be "
            "(..., width) and (classes, width)."
        )
    if weight.numel() == 0:
        raise LossError(f"{NAME}: weight has shape {tuple(weight.shape)}; it needs at least one class and a width.")
    require_indices(NAME, labels)
    if labels.shape != hidden.shape[:-1]:
        raise LossError(
            f"{NAME}: hidden has shape {tuple(hidden.shape)} and labels {tuple(labels.shape)}; "
            f"labels must have shape {tuple(hidden.shape[:-1])}, one for each row."
        )
    if bias is not None:
        require_tensor(NAME, "biases", bias)
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        raise LossError(
            f"{NAME}: bias is {describe(bias)} and weight {describe(weight)}; bias must have the dtype of weight "
            f"and shape {tuple(weight.shape[:1])}."
        )
