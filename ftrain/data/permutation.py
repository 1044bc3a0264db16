"""The shuffled order of an epoch, in bounded memory.

Up to `BLOCK` indices are sorted by random draws, so that all orders are equally likely.

More indices are mapped one by one by a generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002). An index is a pair ``(x, y)`` with ``x < a`` and ``y < b``, where ``a b`` is a little more than
the number of indices. Rounds of ``x += F(y) mod a`` and ``y += F(x) mod b`` permute the pairs; a result that is outside
of the range is mapped again. Of a few indices this does not give all orders equally often, hence the sort.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ftrain import random
from ftrain.data import rng_streams
from ftrain.errors import OptionError

Indices: TypeAlias = npt.NDArray[np.int64]
_UInts: TypeAlias = npt.NDArray[np.uint64]

ROUNDS = 8
BLOCK = 4096
# The finaliser of MurmurHash3 (Appleby): each input bit flips each output bit with probability 1/2.
_SHIFT = np.uint64(33)
_FACTORS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


def shuffled(index: npt.ArrayLike, size: int, *, seed: int = 0, epoch: int = 0) -> Indices:
    """Return the elements at positions `index` of a random permutation of ``0 .. size - 1``.

    A pure function of ``(seed, epoch, index)``, in bounded memory; the order in which `loader` shuffles.

    Args:
        index: positions, integers in ``[0, size)``, of any shape.
        size: the number of elements.
        seed: the seed of the run.
        epoch: the number of the epoch; each epoch has another permutation.

    Returns:
        int64 array of the shape of `index`.

    Raises:
        OptionError: if an index is out of range, or not an integer.

    >>> sorted(int(i) for i in shuffled(range(5), 5, seed=7))
    [0, 1, 2, 3, 4]
    """
    positions = np.asarray(index)
    if positions.size and positions.dtype.kind not in "iu":
        raise OptionError(f"shuffled: index has dtype {positions.dtype}; needs whole numbers in [0, {size})")
    positions = positions.astype(np.int64)
    if positions.size and not 0 <= positions.min() <= positions.max() < size:
        raise OptionError(
            f"shuffled: index ranges from {positions.min()} to {positions.max()}; needs whole numbers in [0, {size})"
        )
    return permuted(positions, size, rng_streams.stream(seed, epoch, rng_streams.ORDER))


def permuted(positions: Indices, size: int, key_data: tuple[int, int]) -> Indices:
    """Return the result of `shuffled` for this key data, without checking the positions."""
    return sorted_draws(size, key_data)[positions] if size <= BLOCK else feistel(positions, size, key_data)


@functools.lru_cache(maxsize=8)
def sorted_draws(size: int, key_data: tuple[int, int]) -> Indices:
    """Return ``0 .. size - 1`` in the order of `ftrain.random.permutation`, which sorts them by draws."""
    return np.asarray(random.permutation(random.wrap_key_data(key_data), size))


def feistel(positions: Indices, size: int, key_data: tuple[int, int]) -> Indices:
    """Return the elements at some positions of the permutation that the Feistel network computes."""
    # Even, so that one round can be an odd permutation: with only even ones, half of all permutations are impossible.
    left = math.isqrt(max(size - 1, 0)) + 1
    left += left % 2
    right = max(-(-size // left), 1)
    # Arrays of at least one axis overflow silently in numpy; scalars cause a warning.
    elements = _rounds(positions.astype(np.uint64).reshape(-1), left, right, key_data)
    outside = np.flatnonzero(elements >= size)
    while outside.size:
        elements[outside] = _rounds(elements[outside], left, right, key_data)
        outside = outside[elements[outside] >= size]
    return elements.astype(np.int64).reshape(positions.shape)


def _rounds(values: _UInts, left: int, right: int, key_data: tuple[int, int]) -> _UInts:
    """Return the results of the network for numbers below ``left * right``."""
    a, b = np.uint64(left), np.uint64(right)
    keys = _round_keys(key_data)
    x, y = values // b, values % b
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        x = (x + _mix(y ^ first) % a) % a
        y = (y + _mix(x ^ second) % b) % b
    encrypted: _UInts = x * b + y
    return encrypted


def _mix(value: _UInts) -> Any:
    """Return the hash of each number, 64 bits."""
    for factor in _FACTORS:
        value = (value ^ (value >> _SHIFT)) * factor
    return value ^ (value >> _SHIFT)


@functools.lru_cache(maxsize=64)
def _round_keys(key_data: tuple[int, int]) -> list[np.uint64]:
    """Return a key of 64 bits for each round."""
    folded = (random.fold_in_key_data(key_data, number) for number in range(ROUNDS))
    return [np.uint64(high << 32 | low) for low, high in folded]
