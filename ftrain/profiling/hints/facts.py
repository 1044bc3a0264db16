"""Facts about a step, its batch and its device, which the rules of hints read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from ftrain.profiling.timing import Interval, Loading

SLOWEST, MIDDLE, FASTEST = range(3)
"""Ranks of attention kernels: not fused, memory-efficient, and flash."""


class Remedy(Enum):
    """Advice of a rule that `ftrain.ladder` measures, so that it is not given if it was measured not to help."""

    LARGER_BATCH = auto()
    BFLOAT16 = auto()
    COMPILE = auto()


@dataclass(frozen=True)
class Matmul:
    """A matrix multiplication, ``(rows, inner) @ (inner, columns)``.

    Args:
        module: dotted name of the module that computes it.
        rows: rows of the first matrix.
        inner: length of the axis that is summed over.
        columns: columns of the second matrix.
        dtype: dtype of the matrices.
        exact: whether it is computed in float32 or float64, and not in TF32.
        flops: floating-point operations.
    """

    module: str
    rows: int
    inner: int
    columns: int
    dtype: torch.dtype
    exact: bool
    flops: int


@dataclass(frozen=True)
class Attention:
    """A call of `scaled_dot_product_attention` or `multi_head_attention_forward`.

    Args:
        module: dotted name of the module that computes it.
        rank: rank of its kernel, `SLOWEST` to `FASTEST`.
        causes: name -> value of the arguments that force a slower kernel.
    """

    module: str
    rank: int
    causes: Mapping[str, str]


@dataclass(frozen=True)
class Facts:
    """All facts that the rules of hints read.

    Args:
        matmuls: matrix multiplications of the forward pass, in all microbatches.
        attentions: calls of attention of the forward pass, in all microbatches.
        compiled: whether the step is compiled.
        mixed: whether the step has mixed precision.
        operations: number of operations of the step.
        flops: floating-point operations of all matmuls of the step.
        multiple: dtype -> number that lengths of axes should be multiples of.
        tf32: whether the device has TF32.
        rates: dtype -> floating-point operations per second of a large matmul.
        gain: time of the largest matmul of the step in float32, divided by its time in bfloat16.
        launch: seconds to launch an operation.
        seconds: seconds of the step.
        loading: seconds to load a batch; None without data.
        tried: remedy -> examples per second with it, relative to the step, for those that were measured.
        emulated: the dtypes that the device emulates: it converts to float32 and back.
    """

    matmuls: Sequence[Matmul]
    attentions: Sequence[Attention]
    compiled: bool
    mixed: bool
    operations: int
    flops: int
    multiple: Callable[[torch.dtype], int]
    tf32: bool
    rates: Mapping[torch.dtype, float]
    gain: float
    launch: float
    seconds: float
    loading: Loading | None = None
    tried: Mapping[Remedy, Interval] = field(default_factory=dict)
    emulated: Sequence[torch.dtype] = ()
