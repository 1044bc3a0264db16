"""Random numbers of samples: what a sample draws depends on the seed, the epoch and its index, and on nothing else."""

from __future__ import annotations

import functools
import random as python_random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from ftrain import random

ORDER, WINDOW, SAMPLE, COLLATION = range(4)
"""What a stream of numbers is for; streams of different purposes share nothing."""

_ASIDE = np.random.MT19937(0)

# What a user is least likely to fold into a key of the same seed.
_DATA = 0x64617461


@functools.lru_cache(maxsize=64)
def stream(seed: int, epoch: int, purpose: int) -> tuple[int, int]:
    """Return the words of the key that belongs to a purpose in an epoch."""
    base = random.fold_in_words(random.words(random.key(seed)), _DATA)
    return random.fold_in_words(random.fold_in_words(base, epoch), purpose)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the generators of torch, Python and numpy for one sample."""
    _seed(random.fold_in_words(stream(seed, epoch, SAMPLE), index))


def seed_collation(seed: int, epoch: int, index: int) -> None:
    """Seed them for the collation of the batch whose first sample has this index."""
    _seed(random.fold_in_words(stream(seed, epoch, COLLATION), index))


def _seed(words: tuple[int, int]) -> None:
    number = random.seed_of(words)
    # Not torch.manual_seed, which would reach for devices, in workers too.
    torch.default_generator.manual_seed(number)
    python_random.seed(number)
    # A word alone, for seeding by several takes six times as long.
    np.random.seed(words[0])


class Watch:
    """Whether the global generators were drawn from, or set, since it was made.

    Python's and numpy's are set to a state that gives known numbers, for to read the state that they are in takes ten
    times as long. What reads a state and sets it back goes unnoticed.

    Args:
        state: that of torch, which stays as it is.
    """

    def __init__(self, state: Tensor) -> None:
        python_random.setstate(_KNOWN)
        np.random.seed(_SEED)
        self._torch = state
        self._next = iter(_NEXT)

    def drawn(self) -> bool:
        """Say it; to be asked at most twice."""
        if _numbers(python_random, mtrand.get_bit_generator()) != next(self._next):
            return True
        return not torch.equal(torch.default_generator.get_state(), self._torch)


def _numbers(python: Any, numpy: Any) -> tuple[int, int, int]:
    return python.getrandbits(64), numpy.random_raw(), numpy.random_raw()


def _known() -> tuple[Any, list[tuple[int, int, int]]]:
    python, numpy = python_random.Random(_SEED), np.random.MT19937()
    np.random.RandomState(numpy).seed(_SEED)
    return python.getstate(), [_numbers(python, numpy) for _ in range(2)]


# What a dataset is least likely to seed with.
_SEED = 0x77617463
_KNOWN, _NEXT = _known()


@contextmanager
def preserved() -> Iterator[Tensor]:
    """Leave the global generators of the host as they were found; gives the state of torch's.

    Except for the second of two Gaussians that ``np.random.randn`` keeps for its next call.
    """
    before = torch.default_generator.get_state(), python_random.getstate(), mtrand.get_bit_generator()
    # Numpy's is put aside, which is far cheaper than to copy its state, twice.
    mtrand.set_bit_generator(_ASIDE)
    try:
        yield before[0]
    finally:
        torch.default_generator.set_state(before[0])
        python_random.setstate(before[1])
        mtrand.set_bit_generator(before[2])
