"""The order of a pass, in bounded memory: up to `BLOCK` indices are shuffled, more are computed index by index.

A shuffle sorts Philox draws, so that all orders are equally likely. Beyond `BLOCK` the order is a bijection: a
generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) over pairs
``(x, y)`` of ``Z_a x Z_b``, with ``a b`` barely above the size: ``x += F(y)`` and ``y += F(x)`` by turns. What
falls outside of the size is sent through again until it falls inside. With few indices, the keys of this network do
not reach all orders equally often.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ftrain import random
from ftrain.data import rng_streams
from ftrain.errors import OptionError
from ftrain.random.philox import philox_host

Indices: TypeAlias = npt.NDArray[np.int64]
Permutation: TypeAlias = Callable[[Indices, int, tuple[int, int]], Indices]
"""Indices, how many there are, and the words of a key -> what stands at these indices."""
_Words: TypeAlias = npt.NDArray[np.uint64]

ROUNDS = 8
BLOCK = 4096
# The finaliser of MurmurHash3 (Appleby), which turns any bit into half of all bits.
_SHIFT = np.uint64(33)
_FACTORS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


def shuffled(index: npt.ArrayLike, size: int, *, seed: int = 0, epoch: int = 0) -> Indices:
    """Return what stands at `index` in the shuffled order of ``0 .. size - 1``.

    A pure function of ``(seed, epoch, index)``, one to one for each size, in bounded memory.

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
    return permuted(slots, size, rng_streams.stream(seed, epoch, rng_streams.ORDER))


def stretch(permutation: Permutation, first: int, count: int, size: int, words: tuple[int, int]) -> Indices:
    """Return what stands at ``first .. first + count - 1`` in an order.

    By blocks that are kept for a while, since who asks for one batch asks for the next one too.
    """
    numbers = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
    blocks = [_block(permutation, number, size, words) for number in numbers]
    begin = first % BLOCK
    return (blocks[0] if len(blocks) == 1 else np.concatenate(blocks))[begin : begin + count]


@functools.lru_cache(maxsize=8)
def _block(permutation: Permutation, number: int, size: int, words: tuple[int, int]) -> Indices:
    return permutation(np.arange(number * BLOCK, min((number + 1) * BLOCK, size), dtype=np.int64), size, words)


def permuted(index: Indices, size: int, words: tuple[int, int]) -> Indices:
    """`shuffled` with the words of a key, and without a check."""
    return sorted_draws(size, words)[index] if size <= BLOCK else enciphered(index, size, words)


@functools.lru_cache(maxsize=8)
def sorted_draws(size: int, words: tuple[int, int]) -> Indices:
    """Return `random.permutation` on the host: ``0 .. size - 1`` in the order of 63-bit draws, two to a block."""
    block = philox_host(words, (np.arange((size + 1) // 2, dtype=np.uint64), 0, 0, 0))
    drawn = np.stack([block[0] << 31 | block[1] >> 1, block[2] << 31 | block[3] >> 1], -1).reshape(-1)
    return np.argsort(drawn[:size], kind="stable").astype(np.int64)


def enciphered(index: Indices, size: int, words: tuple[int, int]) -> Indices:
    """`permuted` by the network alone, which was the order at every size before there were shuffles."""
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


ORDERS: dict[int, Permutation] = {1: enciphered, 2: permuted}
"""By version: a position says from which one its batches come, and one that does not is of version 1."""


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
