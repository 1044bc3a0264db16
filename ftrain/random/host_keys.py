"""Key data: keys as two 32-bit integers on the host. Folding, the keys of each step, and seeds for generators."""

from __future__ import annotations

import functools
import operator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ftrain.errors import ComposeError, OptionError
from ftrain.random.philox import MASK, philox_host

KeyData: TypeAlias = tuple[int, int]
"""The two 32-bit integers of a key."""

FOLD = 2
"""The third counter word of a fold; draws and splits have different words."""

# The keys of torch's own modules and of the optimizer differ from that of the step in these bits, so that neither draws
# the numbers that the loss draws.
_STOCK = 0x73746F63, 0x6B5F6B79
_UPDATE = 0x75706461, 0x74655F6B

_BLOCK = 256
"""Number of steps whose keys are computed at once; a power of two, so that only the lower counter word differs."""


def key_data(key: Tensor) -> KeyData:
    """Return the two 32-bit integers of a key, on the host; waits for the device of the key."""
    first, second = parts_of("key_data", key)[0].tolist()
    return first, second


def wrap_key_data(key_data: KeyData) -> Tensor:
    """Make a key, on the CPU, from its two 32-bit integers: the inverse of `key_data`."""
    return torch.tensor(key_data, dtype=torch.int64, device="cpu")


def parts_of(function: str, key: Any) -> tuple[Tensor, Tensor | None]:
    """Return the two integers of a key, and those of its examples (start and length), or None if it has no examples.

    Raises an OptionError, in the name of `function`, if it is not a key.
    """
    if not isinstance(key, Tensor):
        raise OptionError(
            f"{function}: the key is {'None' if key is None else type(key).__name__}; needs a tensor, as "
            "ftrain.random.key, split or fold_in make. The rng of a loss is None in an evaluation: draw nothing then."
        )
    if key.shape == (2,) and key.dtype == torch.int64:
        return key, None
    if key.shape == (4,) and key.dtype == torch.int64:
        return key[:2], key[2:]
    raise OptionError(
        f"{function}: the key has shape {tuple(key.shape)} and dtype {key.dtype}; needs int64 of shape "
        "(2,), as ftrain.random.key, split or fold_in make."
    )


def fold_in_key_data(key_data: KeyData, data: int) -> KeyData:
    """`fold_in` for key data on the host: the same numbers in a few microseconds.

    >>> from ftrain.random.keys import fold_in, key
    >>> fold_in_key_data(key_data(key(0)), 3) == key_data(fold_in(key(0), 3))
    True
    """
    low, high = halves("fold_in_key_data", "data", data)
    first, second, _, _ = philox_host(key_data, (low, high, FOLD, 0))
    return first, second


def step_key_data(key_data: KeyData, step: int) -> KeyData:
    """`fold_in_key_data` of the number of a step, faster: the keys of `_BLOCK` steps are computed at once.

    >>> step_key_data((7, 0), 300) == fold_in_key_data((7, 0), 300)
    True
    """
    return _block_key_data(key_data, step // _BLOCK)[step % _BLOCK]


@functools.lru_cache(maxsize=16)
def _block_key_data(key_data: KeyData, block: int) -> list[KeyData]:
    low, high = halves("step_key_data", "step", block * _BLOCK)
    first, second, _, _ = philox_host(key_data, (low + np.arange(_BLOCK, dtype=np.uint64), high, FOLD, 0))
    return [*zip(map(int, first), map(int, second), strict=True)]


def stock_key_data(key_data: KeyData) -> KeyData:
    """Return the key data for the random operations of torch, such as `nn.Dropout`, in a step with this key."""
    # Another key of the cipher gives independent numbers.
    return key_data[0] ^ _STOCK[0], key_data[1] ^ _STOCK[1]


def update_key_data(key_data: KeyData) -> KeyData:
    """Return the key data for the optimizer in a step with this key."""
    return key_data[0] ^ _UPDATE[0], key_data[1] ^ _UPDATE[1]


def seed_of(key_data: KeyData) -> int:
    """Return a 63-bit seed for the generators of torch in a step with this key."""
    low, high = stock_key_data(key_data)
    return (high << 32 | low) >> 1


def halves(function: str, name: str, value: int) -> tuple[int, int]:
    """Return the lower and the upper 32 bits of an integer.

    Raises an OptionError if it does not fit in 64 bits, and a ComposeError if it is not an integer.
    """
    try:
        value = operator.index(value)
    except TypeError as error:  # also of a tensor, such as a key
        raise ComposeError(f"{function}: {name} is {value!r:.100}, needs a whole number") from error
    if not -(1 << 63) <= value < 1 << 64:
        raise OptionError(f"{function}: {name} = {value} does not fit in 64 bits; needs -2**63 <= {name} < 2**64.")
    return value & MASK, (value >> 32) & MASK
