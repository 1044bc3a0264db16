"""Send and sum gradients in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain.parallel.compression.method import Compression, Exchange, Memory

LARGEST_EXPONENT = 15
"""Sums in float16 are kept below 2 to this power; the largest float16 is 65504."""
SMALLEST_SCALE, LARGEST_SCALE = -126, 126
"""Exponents of the powers of two that float32 can represent together with their inverses."""
FLOAT32_BIAS, FLOAT32_FRACTION = 127, 23
"""A float32 stores its exponent plus 127 in the bits above the lowest 23."""


def bf16() -> Compression:
    """Return the method that casts gradients to bfloat16: half the bytes, with 8 bits of each number."""

    def combine(grads: list[Tensor], memories: list[Memory], exchange: Exchange) -> tuple[list[Tensor], list[Memory]]:
        sums = exchange.needed_sums([grad.to(torch.bfloat16) for grad in grads])
        return [total.to(grad.dtype) for total, grad in zip(sums, grads, strict=True)], memories

    return Compression("bf16", combine, "{sum} of gradients in bf16")


def fp16() -> Compression:
    """Return the method that casts gradients to float16: half the bytes, with 11 bits of each number.

    Each leaf is multiplied by a power of two first. Ranks derive it from the largest magnitude of the leaf on any rank,
    one more number to send per leaf. So the sum cannot overflow, and an element that is at least 2^-39 times the
    largest is not lost.
    """

    def combine(grads: list[Tensor], memories: list[Memory], exchange: Exchange) -> tuple[list[Tensor], list[Memory]]:
        exponents = _exponents(grads, exchange)
        pairs = zip(grads, _powers_of_two(exponents), strict=True)
        sums = exchange.needed_sums([(grad * scale).to(torch.float16) for grad, scale in pairs])
        triples = zip(sums, grads, _powers_of_two(-exponents), strict=True)
        return [total.to(grad.dtype) * inverse for total, grad, inverse in triples], memories

    return Compression("fp16", combine, "all-reduce of scales; {sum} of gradients in fp16")


def _exponents(grads: list[Tensor], exchange: Exchange) -> Tensor:
    """Return for each leaf the exponent of its scale, as int32[leaves]: the same on all ranks."""
    zero = grads[0].new_zeros((), dtype=torch.float32)
    largest = torch.stack([grad.abs().amax().float() if grad.numel() else zero for grad in grads])
    largest = exchange.group.max(largest)
    of_sum = torch.frexp(largest).exponent + (exchange.group.size - 1).bit_length()
    # Infinity and NaN are sent as they are.
    exponents = torch.where(torch.isfinite(largest), LARGEST_EXPONENT - of_sum, 0)
    return exponents.clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.int32)


def _powers_of_two(exponents: Tensor) -> tuple[Tensor, ...]:
    """Return 2 to these powers as 0-d float32 tensors. They are exact, which `torch.pow` does not promise."""
    return ((exponents + FLOAT32_BIAS) << FLOAT32_FRACTION).view(torch.float32).unbind()
