"""What is known of a step, its batch and its device before anything is said about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ftrain.profiling.timing import Interval, Loading

SLOWEST, MIDDLING, FASTEST = range(3)
"""Kernels of attention: none at all, one that has all of torch's options, and one that is made for speed."""


@dataclass(frozen=True)
class Product:
    """A product of matrices, ``(rows, inner) @ (inner, columns)``.

    Args:
        module: dotted name of the module that it is of.
        rows: and the other lengths of its axes.
        inner: that it sums over.
        columns: of its result.
        dtype: that it is computed in.
        exact: in float32, and not in TF32.
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
        module: dotted name of the module that it is of.
        rank: of its kernel, `SLOWEST` to `FASTEST`.
        causes: argument -> what it was, for those without which the kernel would be a faster one.
    """

    module: str
    rank: int
    causes: Mapping[str, str]


@dataclass(frozen=True)
class Facts:
    """All that hints are found from.

    Args:
        products: of one forward pass.
        attentions: of one forward pass.
        compiled: whether the step is.
        mixed: whether the step has mixed precision.
        operations: of a step.
        flops: of its products.
        multiple: of what lengths of axes should be multiples, by dtype.
        tf32: whether the device has it.
        rates: operations a second in a large product, by dtype.
        gain: how many times as fast the largest of its products is in bfloat16 as in float32.
        launch: seconds that the smallest operation takes.
        seconds: of a step.
        doubled: examples a second of twice the batch, relative to the batch; None where that was not measured.
        loading: seconds of the data; None where there is none.
        tried: examples a second with a technique, relative to the step as given, where that was measured.
        emulated: the narrow dtypes that the device multiplies in by converting to float32 and back.
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
    tried: Mapping[str, Interval] = field(default_factory=dict)
    emulated: Sequence[torch.dtype] = ()
