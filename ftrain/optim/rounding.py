"""Stochastic rounding from float32 to bfloat16: up or down at random, so that the mean is the value itself.

The noise is a keyed hash of the index of an element, because every element needs 16 bits of noise in every step: a hash
takes 0.9 ns in eager mode, and the Philox generator of `ftrain.random` 4 ns. It is integer arithmetic, with the same
bits on every device, eager or compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The finalizer of MurmurHash3 (Appleby 2011), in the signed integers that torch has.
_FIRST, _SECOND = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)
_LOW, _UPPER = 0xFFFF, -0x10000


def noise(key: Tensor, start: int, size: int, *, eager: bool) -> Tensor:
    """Return 16 random bits for each of `size` elements: int32 in 0 .. 65535, of shape (size,).

    The bits of an element depend only on the key and on its index; `start` is the index of the first element. A hash
    has the bits of two elements. If `eager`, both are taken from one hash, which takes half the time; a compiler could
    not fuse that.
    """
    offset, secret = key.to(torch.int32).unbind()
    first_hash, odd = divmod(start, 2)
    # Wrapped to the range of int32, to which torch does not convert larger numbers.
    offset = offset + ((first_hash + (1 << 31)) % (1 << 32) - (1 << 31))
    if eager:
        hashes = _hash(torch.arange((size + odd + 1) // 2, dtype=torch.int32, device=key.device), offset, secret)
        return hashes.view(torch.uint16)[odd : odd + size].to(torch.int32)
    index = torch.arange(odd, size + odd, dtype=torch.int32, device=key.device)
    hashes = _hash(index >> 1, offset, secret)
    return torch.where((index & 1) == 0, hashes, hashes >> 16) & _LOW


def _hash(x: Tensor, offset: Tensor, secret: Tensor) -> Tensor:
    """Return the hashes of integers, which overwrite them; `offset` and `secret` are the two halves of a key."""
    x.add_(offset)
    # A shift of signed integers repeats the sign bit, which the masks remove.
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST).bitwise_xor_(secret)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values rounded up or down to bfloat16 values, with probabilities that make the mean the value.

    NaN and infinities stay. `bits` are `noise` of the same shape. Overwrites `values`.
    """
    # Replaces every NaN by the default one: noise added to the bits of another could overflow into its sign.
    values.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)
    return values.view(torch.int32).add(bits).bitwise_and_(_UPPER).view(torch.float32)
