"""What kernels of convolutions take for themselves on a CPU, as torch's profiler shows it (2.13).

Those of oneDNN convolve in a layout of its own, with channels in blocks. What comes in the plain layout is copied into
that, and what is made is copied out of it, each as large as an activation; what comes with its channels last is
computed on as it is. In bfloat16, the gradient of a weight takes a little more, which is not counted. For a dtype that
oneDNN has no products of on this CPU, torch writes the columns that a kernel sees one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCKS = {"AVX512": 16, "AVX2": 8}
LASTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def scratch(name: str, args: Sequence[Any]) -> int:
    """Return how many bytes the kernel of an operation takes while it runs, beside what it returns.

    Args:
        name: of the operation, as in ATen.
        args: what it is given; the tensors need no memory.
    """
    if name == "convolution" and not args[6]:
        return _forward(args[0], args[1], *args[3:6])
    if name == "convolution_backward" and not args[7]:
        return _backward(*args[:3], *args[4:7], mask=args[10])
    return 0


def _forward(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> int:
    axes = list(_axes(x, weight, stride, padding, dilation))
    places = math.prod((length + 2 * pad - gap * (width - 1) - 1) // step + 1 for length, width, step, pad, gap in axes)
    if not _is_served(x.dtype):
        return _columns(x, weight, axes, places)
    if (block := _block(x, weight)) == 0:
        return 0
    made = x.shape[0] * places * x.element_size()
    own = made * _padded(weight.shape[0], block)
    # First there are the copies and what it makes in its own layout, then that and what it returns.
    before = _source(x, block) + weight.nbytes + own - made * weight.shape[0]
    return max(before, own)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    mask: Sequence[bool],
) -> int:
    if not _is_served(x.dtype):
        columns = _columns(x, weight, list(_axes(x, weight, stride, padding, dilation)), math.prod(grad.shape[2:]))
        # The gradient of the bias is summed in float32.
        wide = grad.numel() * torch.float32.itemsize if mask[2] else 0
        # Of volumes, the gradient of the input takes columns, too.
        return max(columns * (mask[1] or x.ndim == 5), wide - weight.nbytes)
    if (block := _block(x, weight)) == 0:
        last = LASTS.get(x.ndim)
        return sum(each.nbytes for each in (grad, x, weight) if last and not each.is_contiguous(memory_format=last))
    copies = _blocked(grad, block) + _blocked_weight(weight, block)
    returned = x.nbytes * mask[0] + weight.nbytes * mask[1]
    # First the gradient of the input is made and copied out, twice of steps, then that of the weight is made beside it.
    own = _blocked(x, block)
    of_input = max(copies + own, own * (1 + (max(stride) > 1)) + x.nbytes) * mask[0]
    of_weight = (copies + _source(x, block) + x.nbytes * mask[0]) * mask[1]
    return max(0, of_input - returned, of_weight - returned)


def _axes(x: Tensor, weight: Tensor, *options: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Of each axis its length, the width of the kernel, and the options, of which one number stands for all axes."""
    each = [list(option) * (x.ndim - 2 if len(option) == 1 else 1) for option in options]
    return zip(x.shape[2:], weight.shape[2:], *each, strict=True)


def _is_served(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of a dtype on this CPU."""
    able = {
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    }
    return dtype not in able or bool(able[dtype]())


def _columns(x: Tensor, weight: Tensor, axes: Sequence[tuple[int, ...]], places: int) -> int:
    """Bytes of what a kernel sees at each place; of one that sees a single element, that is the input as it is."""
    if all((width, step, pad) == (1, 1, 0) for _, width, step, pad, _ in axes):
        return 0
    return x.shape[0] * math.prod(weight.shape[1:]) * places * x.element_size()


def _block(x: Tensor, weight: Tensor) -> int:
    """Channels in a block of oneDNN's own layout; 0 where it computes on what it is given."""
    last = LASTS.get(x.ndim)
    if last and any(each.is_contiguous(memory_format=last) and not each.is_contiguous() for each in (x, weight)):
        return 0
    capability = torch.backends.cpu.get_cpu_capability()
    return next((size for name, size in BLOCKS.items() if capability.startswith(name)), 0)


def _padded(channels: int, block: int) -> int:
    return -(-channels // block) * block


def _blocked(value: Tensor, block: int) -> int:
    """Bytes in the layout of blocks."""
    return value.nbytes // value.shape[1] * _padded(value.shape[1], block)


def _source(x: Tensor, block: int) -> int:
    """Bytes of the copy of an input; images of a few channels are taken as they are."""
    return _blocked(x, block) if 2 * x.shape[1] > block else 0


def _blocked_weight(weight: Tensor, block: int) -> int:
    outputs, inputs = weight.shape[:2]
    # Of a channel by itself there is nothing to be in a block with.
    return (
        weight.nbytes
        if inputs == 1
        else weight.nbytes // (outputs * inputs) * _padded(outputs, block) * _padded(inputs, block)
    )
