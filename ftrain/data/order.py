"""The order of a pass: a bijection that is computed index by index, so that no permutation is stored anywhere.

A generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) over pairs
``(x, y)`` of ``Z_a x Z_b``, with ``a b`` barely above the size: ``x += F(y)`` and ``y += F(x)`` by turns. What
falls outside of the size is sent through again until it falls inside.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ftrain import random
from ftrain.data import draws
from ftrain.errors import OptionError

Indices: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]

ROUNDS = 8
BLOCK = 4096
# The finaliser of MurmurHash3 (Appleby), which turns any bit into half of all bits.
_SHIFT = np.uint64(33)
_FACTORS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


def shuffled(index: npt.ArrayLike, size: int, *, seed: int = 0, epoch: int = 0) -> Indices:
    """Return what stands at `index` in the shuffled order of ``0 .. size - 1``.

    A pure function of ``(seed, epoch, index)``, one to one for each size, in constant memory.

    Args:
        index: integers in ``[0, size)``, of any shape.
        size: how many there are to shuffle.
        seed: of the run.
        epoch: each pass has an order of its own.

    Raises:
        OptionError: for an index outside of the range.

    >>> sorted(int(i) for i in shuffled(range(5), 5, seed=7))
    [0, 1, 2, 3, 4]
    """
    slots = np.asarray(index, dtype=np.int64)
    if slots.size and not 0 <= slots.min() <= slots.max() < size:
        raise OptionError(
            f"shuffled: index goes from {slots.min()} to {slots.max()}; needs whole numbers in [0, {size})"
        )
    return permuted(slots, size, draws.stream(seed, epoch, draws.ORDER))


def stretch(first: int, count: int, size: int, *, seed: int, epoch: int) -> Indices:
    """Return `shuffled` of ``first .. first + count - 1``.

    By blocks that are kept for a while, since who asks for one batch asks for the next one too.
    """
    last = first + count - 1
    blocks = [_block(number, size, seed, epoch) for number in range(first // BLOCK, last // BLOCK + 1)]
    begin = first % BLOCK
    return np.concatenate(blocks)[begin : begin + count] if count else np.empty(0, np.int64)


@functools.lru_cache(maxsize=8)
def _block(number: int, size: int, seed: int, epoch: int) -> Indices:
    slots = np.arange(number * BLOCK, min((number + 1) * BLOCK, size), dtype=np.int64)
    return permuted(slots, size, draws.stream(seed, epoch, draws.ORDER))


def permuted(index: Indices, size: int, words: tuple[int, int]) -> Indices:
    """`shuffled` with the words of a key, and without a check."""
    # Even, for then a round can be an odd permutation, and all of them can be reached.
    left = math.isqrt(max(size - 1, 0)) + 1
    left += left % 2
    right = -(-size // left)
    # Arrays of at least one axis: numpy wraps these silently, where it warns about single numbers.
    found = _rounds(index.astype(np.uint64).reshape(-1), left, max(right, 1), words)
    outside = np.flatnonzero(found >= size)
    while outside.size:
        found[outside] = _rounds(found[outside], left, right, words)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64).reshape(index.shape)


def _rounds(slots: _Words, left: int, right: int, words: tuple[int, int]) -> _Words:
    a, b = np.uint64(left), np.uint64(right)
    keys = _keys(words)
    x, y = slots // b, slots % b
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        x = (x + _mixed(y ^ first) % a) % a
        y = (y + _mixed(x ^ second) % b) % b
    found: _Words = x * b + y
    return found


def _mixed(value: _Words) -> Any:
    for factor in _FACTORS:
        value = (value ^ (value >> _SHIFT)) * factor
    return value ^ (value >> _SHIFT)


@functools.lru_cache(maxsize=64)
def _keys(words: tuple[int, int]) -> list[np.uint64]:
    folded = (random.fold_in_words(words, number) for number in range(ROUNDS))
    return [np.uint64(high << 32 | low) for low, high in folded]
