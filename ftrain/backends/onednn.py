"""Products of float32 matrices on the CPU by oneDNN; `torch.mm` calls the BLAS that torch was built with."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain._torch import OpOverload, private_names

_LIBRARY: Any = torch.library.Library("ftrain", "FRAGMENT")  # type: ignore[no-untyped-call]


class Least(NamedTuple):
    """The smallest numbers of multiplications in a product that oneDNN computes faster than MKL.

    `transposed` is that of a product whose first matrix is not stored by rows, as in the gradient of a weight: oneDNN
    copies such a matrix.
    """

    by_rows: int
    transposed: int


WITH_WHOLE_VECTORS = Least(1 << 22, 1 << 25)
"""On AMD's CPUs that compute 512 bits at once: an EPYC of family 26 takes less than half of the time of MKL."""
WITH_HALF_VECTORS = Least(1 << 25, 1 << 31)
"""On those that compute 256 bits at once: an EPYC of family 25 with AVX-512 takes 0.84 to 0.97 of the time of MKL for
products of 2^25 multiplications or more, and up to 1.6 times as long for others."""
FAMILY_WITH_WHOLE_VECTORS = 26


@functools.cache
def least_faster() -> Least | None:
    """Return which float32 products oneDNN computes faster than MKL, the BLAS of torch for x86; None if none are.

    On AMD's CPUs MKL is no faster than vectors of 256 bits allow, so oneDNN is faster with AVX-512. Without it, it took
    0.75 to 1.6 times as long on the EPYC of family 25, and longer in most cases.
    """
    onednn: Any = torch.backends.mkldnn
    mkl: Any = torch.backends.mkl
    has_both = mkl.is_available() and onednn.is_available() and onednn.enabled
    is_amd = str(torch.cpu.get_capabilities().get("cpu_name")).startswith("AMD")
    if not has_both or not is_amd or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    return WITH_WHOLE_VECTORS if _cpu_family() >= FAMILY_WITH_WHOLE_VECTORS else WITH_HALF_VECTORS


def _cpu_family() -> int:
    """Return the family of the CPU: of AMD's, 25 is Zen 3 and 4, and 26 is Zen 5; 0 if it is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = platform.processor()  # On Windows "AMD64 Family 25 Model 97 ...".
    family = re.search(r"family\s*:?\s*(\d+)", text, re.IGNORECASE)
    return int(family[1]) if family else 0


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
