"""Products of float32 matrices on the CPU by oneDNN; `torch.mm` calls the BLAS that torch was built with."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ftrain._torch import OpOverload, private_names

_LIBRARY: Any = torch.library.Library("ftrain", "FRAGMENT")  # type: ignore[no-untyped-call]


def is_faster() -> bool:
    """Whether oneDNN multiplies large float32 matrices faster than MKL, the BLAS of torch for x86.

    On AMD's CPUs MKL is no faster than vectors of 256 bits allow. On an EPYC of family 26, the only one measured,
    oneDNN was more than 2 times as fast with AVX-512, and 1.15 times without.
    """
    onednn: Any = torch.backends.mkldnn
    mkl: Any = torch.backends.mkl
    has_both = mkl.is_available() and onednn.is_available() and onednn.enabled
    return has_both and str(torch.cpu.get_capabilities().get("cpu_name")).startswith("AMD")


@functools.cache
def product() -> OpOverload:
    """Return an operation ``(a, b) -> a @ b``, which Inductor calls and does not decompose.

    Each call of an operation of `torch.library.custom_op` would take 6 us longer.
    """
    with private_names():
        linear = torch.ops.mkldnn._linear_pointwise.default

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        rows, inner = a.shape
        columns = b.shape[1]
        result: Tensor
        # The kernel copies its first argument if it is not stored by rows. If a copy of `a` is larger than those of `b`
        # and of the result, as in the gradient of the embedding of a vocabulary, the transposed product is cheaper.
        if a.stride(1) == 1 or rows * inner <= inner * columns + rows * columns:
            result = linear(a, b.t(), None, "none", [], "")
        else:
            result = linear(b.t(), a, None, "none", [], "").t().contiguous()
        return result

    _LIBRARY.define("onednn_product(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.flexible_layout,))
    _LIBRARY.impl("onednn_product", multiply, "CPU")
    torch.library.register_fake("ftrain::onednn_product", torch.mm, lib=_LIBRARY)
    return torch.ops.ftrain.onednn_product.default
