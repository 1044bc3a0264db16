"""Cross-entropy of a linear layer by chunks of rows, with its gradients in the same pass.

The gradient of a row's loss with respect to its logits is ``(1 - s) w[y] (p - onehot(y)) + s/C (W p - w)`` with
``W = sum_c w[c]``. It needs only the cotangent from the backward pass, a common factor. So a chunk of logits
becomes its own gradient in place, is added to the gradients of hidden, weight and bias, and its memory is used for the
next chunk.

All of it is one operation of torch: if the chunks were separate operations in the graph of a step, a compiler could
reorder them until all logits exist at once, and a policy of `remat` that keeps matmuls would keep the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain import backends
from ftrain.losses.inputs import at_least_float32

CHUNK_BYTES = 2**26
"""The largest size of a chunk of logits. Measured on two cores: with half of it a step takes 3% more time, and far more
while other programs use the cores; with twice as much, 2% less."""

QUEUED_CHUNK_BYTES = 2**29
"""As `CHUNK_BYTES`, on a device that queues its work, as GPUs do: it needs large operations to be fast. Measured on an
H200 with 128,256 classes: with a quarter of it a step takes 63% more time, with half 18% more, with twice 3% less."""

WEIGHT_SHARE = 8
"""A chunk may be larger than that if it takes at most the memory of the weight divided by this number. Each chunk reads
and writes the gradient of the weight, which makes small chunks slow on a fast device."""

TILE = 2**22
"""The number of elements of the weight gradient that are computed in 16 bits at once, and then added in 32 bits."""


@torch.library.custom_op("ftrain::linear_cross_entropy", mutates_args=())
def losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    chunk: int | None,
    dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of the losses, and its gradients with respect to hidden, weight and bias, in at least float32.

    `needs` is whether each of the three is needed; the others are empty. The arguments are those of
    `linear_cross_entropy`, with `hidden` of shape (rows, width) and int64 `labels` of shape (rows,). `dtype` is the
    dtype of matmuls.
    """
    wide = at_least_float32(dtype)
    weight_of_class = hidden.new_ones(len(weight), dtype=wide) if class_weight is None else class_weight.to(wide)
    total = hidden.new_zeros((), dtype=wide)
    backend = backends.of(hidden.device)
    # Not float16: differences of probabilities would underflow, since the loss scale is applied only later.
    dtype_of_error = torch.float32 if dtype == torch.float16 else dtype
    add = _add_in_float32 if backend.out_dtype and dtype_of_error == torch.bfloat16 else _add_by_tiles
    limit = CHUNK_BYTES if backend.immediate else QUEUED_CHUNK_BYTES
    chunk = min(chunk or auto_chunk(weight, dtype, limit), max(len(hidden), 1))
    # The autocast of the caller applies inside an operation too, and would cast the matmuls a second time.
    with torch.autocast(hidden.device.type, enabled=False):
        narrow = _padded(weight.to(dtype), backend.multiple(dtype))
        grads = _gradients(hidden, narrow, dtype, needs)
        memory = hidden.new_empty((chunk, len(narrow)), dtype=wide)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            targets = _targets(labels[rows], weight_of_class, ignore_index, label_smoothing)
            # Infinite or NaN values of an ignored row must not reach the sums over rows: 0 x NaN is NaN.
            part = hidden[rows].to(dtype).masked_fill(~targets.not_ignored[:, None], 0)
            error = memory[: len(part)]
            total += _turn_into_gradient(_logits(part, narrow, bias, error, len(weight)), targets)
            add(grads, rows, error, part.to(dtype_of_error), narrow)
            if needs[2]:
                grads[2].add_(error.sum(0))
    return total, grads[0], grads[1][: len(weight)], grads[2][: len(weight)]


@losses_and_gradients.register_fake
def _(hidden: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, dtype, needs = options
    return hidden.new_empty((), dtype=at_least_float32(dtype)), *_gradients(hidden, weight, dtype, needs)


def auto_chunk(weight: Tensor, dtype: torch.dtype, limit: int) -> int:
    """Return the number of rows in a chunk.

    A power of two whose logits take at most `limit` bytes, or ``1 / WEIGHT_SHARE`` of the weight if that is more.
    """
    classes, width = weight.shape
    size = at_least_float32(dtype).itemsize
    rows = max(limit // (classes * size), width // WEIGHT_SHARE, 1)
    return 1 << (int(rows).bit_length() - 1)


_Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _gradients(hidden: Tensor, weight: Tensor, dtype: torch.dtype, needs: list[bool]) -> _Gradients:
    """Return zeros like hidden, weight and bias; empty where no gradient is needed."""
    shapes = tuple(hidden.shape), tuple(weight.shape), (weight.shape[0],)
    hidden_grad, weight_grad, bias_grad = (
        hidden.new_zeros(shape if needed else (0,), dtype=at_least_float32(dtype))
        for shape, needed in zip(shapes, needs, strict=True)
    )
    return hidden_grad, weight_grad, bias_grad


class _Targets(NamedTuple):
    """The coefficients of each row: its gradient is ``slope p - peak onehot(label) - floor spread``."""

    labels: Tensor
    not_ignored: Tensor
    slope: Tensor
    peak: Tensor
    floor: Tensor
    spread: Tensor | None


def _targets(labels: Tensor, weight: Tensor, ignored: int, smoothing: float) -> _Targets:
    not_ignored = labels != ignored
    labels = labels.masked_fill(~not_ignored, 0)
    peak = torch.where(not_ignored, (1.0 - smoothing) * weight[labels], 0.0)
    floor = not_ignored.to(weight.dtype) * (smoothing / len(weight))
    return _Targets(labels, not_ignored, peak + floor * weight.sum(), peak, floor, weight if smoothing else None)


def _padded(weight: Tensor, multiple: int) -> Tensor:
    """Add classes of zeros, so that the number of classes is a multiple: other matmuls may take far longer.

    The padding is not part of the softmax, and its logits stay 0.
    """
    padding = -len(weight) % multiple
    return torch.nn.functional.pad(weight, (0, 0, 0, padding)) if padding else weight


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, classes: int) -> Tensor:
    """Write ``hidden @ weight.T`` to `out`; return the logits of the classes without padding, a view of it."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(torch.mm(hidden, weight.t()))
    logits = out[:, :classes]
    return logits if bias is None else logits.add_(bias)


def _turn_into_gradient(logits: Tensor, targets: _Targets) -> Tensor:
    """Overwrite logits with the gradient of the sum of their losses, and return this sum."""
    label = targets.labels[:, None]
    logits -= logits.amax(1, keepdim=True)
    at_label = logits.gather(1, label).squeeze(1)
    mean = None if targets.spread is None else logits @ targets.spread
    exp_sums = logits.exp_().sum(1)
    losses = targets.slope * exp_sums.log() - targets.peak * at_label
    if mean is not None:
        losses -= targets.floor * mean
    total = torch.where(targets.not_ignored, losses, 0.0).sum()
    logits *= (targets.slope / exp_sums)[:, None]
    if targets.spread is not None:
        logits.addr_(targets.floor, targets.spread, alpha=-1)
    logits.scatter_add_(1, label, -targets.peak[:, None])
    return total


def _add_in_float32(grads: _Gradients, rows: slice, error: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """As `_add_by_tiles`, on a device that multiplies in 16 bits and adds in 32 bits in one operation."""
    hidden_grad, weight_grad, _ = grads
    error = error.to(weight.dtype)
    if hidden_grad.numel():
        torch.mm(error, weight, out_dtype=torch.float32, out=hidden_grad[rows])
    if weight_grad.numel():
        torch.addmm(weight_grad, error.t(), hidden, out_dtype=torch.float32, out=weight_grad)


def _add_by_tiles(grads: _Gradients, rows: slice, error: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Add the gradients of a chunk to those of hidden and weight; `error` is the gradient of the chunk's logits."""
    hidden_grad, weight_grad, _ = grads
    for tile in _tiles(weight, error.dtype):
        part = error[:, tile].to(hidden.dtype)
        if hidden_grad.numel():
            _add_matmul(hidden_grad[rows], part, weight[tile].to(hidden.dtype))
        if weight_grad.numel():
            _add_matmul(weight_grad[tile], part.t(), hidden)


def _tiles(weight: Tensor, wide: torch.dtype) -> list[slice]:
    """Return slices of the classes, so small that copies and results of matmuls in 16 bits take little memory.

    If the weight has the dtype `wide`, there are no copies, and one slice has all classes.
    """
    step = len(weight) if weight.dtype == wide else max(TILE // max(weight.shape[1], 1), 1)
    return [slice(start, start + step) for start in range(0, len(weight), step)]


def _add_matmul(to: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == to.dtype:
        to.addmm_(a, b)
    else:
        to += a @ b
