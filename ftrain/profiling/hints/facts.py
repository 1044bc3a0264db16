"""The facts about a step, its batch and its device that the rules of hints read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from ftrain.profiling.timing import Interval, Loading

SLOWEST, MIDDLING, FASTEST = range(3)
"""Ranks of the kernels of attention: no fused kernel, the memory-efficient one, and the flash kernel."""


class Remedy(Enum):
    """What rules advise that may have been measured before, and in whose place the measurement stands."""

    LARGER_BATCH = auto()
    BFLOAT16 = auto()
    COMPILE = auto()


@dataclass(frozen=True)
class Product:
    """A product of matrices, ``(rows, inner) @ (inner, columns)``.

    Args:
        module: dotted name of the module that computes it.
        rows: of the result.
        inner: length of the axis that is summed over.
        columns: of the result.
        dtype: of the factors.
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
    """A call of `scaled_dot_product_attention`, or of attention in another form.

    Args:
        module: dotted name of the module that computes it.
        rank: of its kernel, `SLOWEST` to `FASTEST`.
        causes: argument -> its value, for those that force a slower kernel.
    """

    module: str
    rank: int
    causes: Mapping[str, str]


@dataclass(frozen=True)
class Facts:
    """All that the rules of hints read.

    Args:
        products: of one forward pass.
        attentions: of one forward pass.
        compiled: whether the step is compiled.
        mixed: whether the step has mixed precision.
        operations: number of operations of a step.
        flops: floating-point operations of its products.
        multiple: dtype -> the number of which lengths of axes should be multiples.
        tf32: whether the device has TF32.
        rates: dtype -> floating-point operations per second in a large product.
        gain: time of its largest product in float32, divided by that in bfloat16.
        launch: seconds that the smallest operation takes.
        seconds: of a step.
        doubled: examples per second with twice the batch, relative to the batch; None where it was not measured.
        loading: seconds to load a batch; None without data.
        tried: remedy -> examples per second with it, relative to the step as it is, where it was measured.
        emulated: the narrow dtypes in which the device multiplies by converting to float32 and back.
    """

    products: Sequence[Product]
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
    doubled: Interval | None = None
    loading: Loading | None = None
    tried: Mapping[Remedy, Interval] = field(default_factory=dict)
    emulated: Sequence[torch.dtype] = ()
