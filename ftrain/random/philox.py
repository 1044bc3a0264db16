"""The cipher of `ftrain.random`: Philox-4x32-10, a pure function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; in wrapping int64 arithmetic, the
same bits on every device, eager, traced, compiled, vmapped and recomputed.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(key: Tensor, counter: Words) -> Words:
    """Return the words that Philox-4x32-10 computes from a key and counter words, which are broadcast.

    Products wrap around, since only their low 64 bits are used. A word keeps the upper half of its product until the
    mask after the next xor, which saves a third of the masks. Words are not stacked in pairs, although that takes fewer
    calls: exchanging rows would keep a compiler from fusing the rounds.
    """
    # 0-d tensors on the device: faster in eager mode than numbers, and without a copy from the host.
    mask, shift, m0, m1 = (full(key, value) for value in (MASK, 32, *_MULTIPLIERS))
    weyl = torch.arange(_WEYL[0], _WEYL[1] + 1, _WEYL[1] - _WEYL[0], device=key.device)
    rounds = torch.arange(_ROUNDS, device=key.device).unsqueeze(-1)
    keys = (key + rounds * weyl).reshape(-1).unbind()
    c0, c1, c2, c3 = counter
    for k0, k1 in zip(keys[::2], keys[1::2], strict=True):
        p0, p1 = c0 * m0, c2 * m1
        c0, c2 = ((p1 >> shift) ^ (c1 ^ k0)) & mask, ((p0 >> shift) ^ (c3 ^ k1)) & mask
        c1, c3 = p1, p0
    return c0, c1 & mask, c2, c3 & mask


def philox_host(key: tuple[int, int], counter: tuple[Any, int, int, int]) -> tuple[Any, Any, Any, Any]:
    """`philox` on the host, in plain Python integers; the first counter may be a numpy array of dtype uint64."""
    (m0, m1), (w0, w1), mask = _MULTIPLIERS, _WEYL, MASK
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return c0, c1, c2, c3


def full(key: Tensor, value: int) -> Tensor:
    """Return a 0-d int64 tensor on the device of a key; filled there, since a copy from the host would wait."""
    return torch.full((), value, dtype=torch.int64, device=key.device)
