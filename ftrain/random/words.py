"""The words of keys on the host, as Python integers: the words of each step, and the seeds made from them."""

from __future__ import annotations

import functools
import operator
from typing import SupportsIndex

import numpy as np

from ftrain.errors import ComposeError, OptionError
from ftrain.random.philox import MASK, philox_host

FOLD = 2
"""The third counter word of a fold; draws and splits have others."""

# Numbers that users are unlikely to fold into a key: torch's own modules must not draw the numbers of the loss itself.
_STOCK = 0x73746F63, 0x6B5F6B79
_UPDATE = 0x75706461, 0x74655F6B

_BLOCK = 256
"""Number of steps whose words are computed at once; a power of two, so that they differ only in the lower word."""


def fold_in_words(words: tuple[int, int], data: int) -> tuple[int, int]:
    """`fold_in` on the host, in Python integers: the same words in a few microseconds.

    >>> from ftrain.random.keys import fold_in, key, key_data
    >>> fold_in_words(key_data(key(0)), 3) == key_data(fold_in(key(0), 3))
    True
    """
    low, high = halves("fold_in_words", "data", data)
    first, second, _, _ = philox_host(words, (low, high, FOLD, 0))
    return first, second


def words_of_step(words: tuple[int, int], step: int) -> tuple[int, int]:
    """`fold_in_words` of the number of a step, from a table for the steps around it.

    >>> words_of_step((7, 0), 300) == fold_in_words((7, 0), 300)
    True
    """
    return _words_of_block(words, step // _BLOCK)[step % _BLOCK]


@functools.lru_cache(maxsize=16)
def _words_of_block(words: tuple[int, int], block: int) -> list[tuple[int, int]]:
    low, high = halves("words_of_step", "step", block * _BLOCK)
    first, second, _, _ = philox_host(words, (low + np.arange(_BLOCK, dtype=np.uint64), high, FOLD, 0))
    return [*zip(map(int, first), map(int, second), strict=True)]


def stock_words(words: tuple[int, int]) -> tuple[int, int]:
    """Return the words of the key for the random operations of torch (`nn.Dropout`, say) in a step with this key."""
    # Another key of the cipher gives independent numbers.
    return words[0] ^ _STOCK[0], words[1] ^ _STOCK[1]


def update_words(words: tuple[int, int]) -> tuple[int, int]:
    """Return the words of the key for the optimizer in a step with this key."""
    return words[0] ^ _UPDATE[0], words[1] ^ _UPDATE[1]


def seed_of(words: tuple[int, int]) -> int:
    """Return a 63-bit seed for the generators of torch from the words of a key."""
    return ((words[1] ^ _STOCK[1]) << 32 | (words[0] ^ _STOCK[0])) >> 1


def halves(function: str, name: str, value: int) -> tuple[int, int]:
    """Return the lower and the upper 32 bits of an integer.

    Raises:
        OptionError: when it does not fit in 64 bits.
        ComposeError: if it is not an integer.
    """
    if not isinstance(value, SupportsIndex):
        raise ComposeError(f"{function}: {name} is {value!r}, needs a whole number")
    value = operator.index(value)
    if not -(1 << 63) <= value < 1 << 64:
        raise OptionError(f"{function}: {name} = {value} does not fit in 64 bits; needed -2**63 <= {name} < 2**64.")
    return value & MASK, (value >> 32) & MASK
