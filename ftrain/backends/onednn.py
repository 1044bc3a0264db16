"""What oneDNN's kernels for a CPU take for themselves, as torch's profiler shows it (2.13).

It convolves in a layout of its own, with channels in blocks. What comes in the plain layout is copied into that, and
what is made is copied out of it, each as large as an activation; what comes with its channels last is computed on as it
is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        return _backward(*args[:3])
    return 0


def _forward(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> int:
    if (block := _block(x, weight)) == 0:
        return 0
    # One number stands for all axes.
    options = [list(each) * (x.ndim - 2 if len(each) == 1 else 1) for each in (stride, padding, dilation)]
    axes = zip(x.shape[2:], weight.shape[2:], *options, strict=True)
    lengths = [(length + 2 * pad - gap * (width - 1) - 1) // step + 1 for length, width, step, pad, gap in axes]
    made: int = x.shape[0] * math.prod(lengths) * x.element_size()
    own = made * (-(-weight.shape[0] // block) * block)
    # First there are the copies and what it makes in its own layout, then that and what it returns.
    before = _blocked(x, block) + _blocked(weight, 1) + own - made * weight.shape[0]
    return max(before, own)


def _backward(grad: Tensor, x: Tensor, weight: Tensor) -> int:
    if (block := _block(x, weight)) == 0:
        last = LASTS.get(x.ndim)
        return sum(each.nbytes for each in (grad, x, weight) if last and not each.is_contiguous(memory_format=last))
    return _blocked(grad, block) + _blocked(x, block) + _blocked(weight, 1)


def _block(x: Tensor, weight: Tensor) -> int:
    """Channels in a block of oneDNN's own layout; 0 where it computes on what it is given."""
    last = LASTS.get(x.ndim)
    if last is None or any(each.is_contiguous(memory_format=last) and not each.is_contiguous() for each in (x, weight)):
        return 0
    capability = torch.backends.cpu.get_cpu_capability()
    return next((size for name, size in BLOCKS.items() if capability.startswith(name)), 0)


def _blocked(value: Tensor, block: int) -> int:
    """Bytes in the layout of blocks; images of a few channels are taken as they are."""
    channels = value.shape[1]
    return 0 if channels < block else value.nbytes // channels * (-(-channels // block) * block)
