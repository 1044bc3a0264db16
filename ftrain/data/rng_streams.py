"""Random numbers of samples: what a sample draws depends on the seed, the epoch and its index, and on nothing else."""

from __future__ import annotations

import functools
import random as python_random
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from ftrain import random

ORDER, WINDOW, SAMPLE, COLLATION = range(4)
"""Purposes of the keys of an epoch. Keys of different purposes give independent numbers."""

# Folded into the key of the seed; a number that users are unlikely to fold into a key of the same seed themselves.
_DATA = 0x64617461

# The global state of numpy while samples are read.
_SPARE = np.random.MT19937(0)


@functools.lru_cache(maxsize=64)
def stream(seed: int, epoch: int, purpose: int) -> tuple[int, int]:
    """Return the two words of the key for a purpose in an epoch."""
    base = random.fold_in_words(random.key_data(random.key(seed)), _DATA)
    return random.fold_in_words(random.fold_in_words(base, epoch), purpose)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators of torch, Python and numpy for the sample with this index."""
    _seed(random.fold_in_words(stream(seed, epoch, SAMPLE), index))


def seed_collation(seed: int, epoch: int, index: int) -> None:
    """Seed them for the collation of the batch whose first sample has this index."""
    _seed(random.fold_in_words(stream(seed, epoch, COLLATION), index))


def _seed(words: tuple[int, int]) -> None:
    number = random.seed_of(words)
    # Not torch.manual_seed, which seeds the devices as well, in workers too.
    torch.default_generator.manual_seed(number)
    python_random.seed(number)
    # One word only: seeding numpy with several takes six times as long.
    np.random.seed(words[0])


class PreservedState:
    """Context in which code may use the global generators of torch, Python and numpy; restores their states on exit.

    Except for the second of the two normal numbers that ``np.random.randn`` computes at once and keeps for its next
    call.
    """

    __slots__ = ("_numpy", "_python", "torch")

    def __enter__(self) -> PreservedState:
        self.torch = torch.default_generator.get_state()
        self._python = python_random.getstate()
        # Replaced instead of copied, which takes a hundred times as long.
        self._numpy = mtrand.get_bit_generator()
        mtrand.set_bit_generator(_SPARE)
        return self

    def __exit__(self, *error: object) -> None:
        torch.default_generator.set_state(self.torch)
        python_random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)


class DrawDetector:
    """Tells whether one of the global generators has been drawn from, or set, since this was created.

    The generators of Python and numpy are seeded, and their next numbers compared with those that this seed gives:
    reading their states takes several times as long. Code that reads a state, draws and then sets that state again is
    not detected.

    Args:
        preserved: the active context; the generator of torch must still be in the state that it had on entry.
    """

    __slots__ = ("_torch",)

    def __init__(self, preserved: PreservedState) -> None:
        python_random.seed(_KNOWN_SEED)
        np.random.seed(_KNOWN_SEED)
        self._torch = preserved.torch

    def has_drawn(self) -> bool:
        """Return whether a generator has been used; can be called once."""
        if _next_numbers(python_random, mtrand.get_bit_generator()) != _KNOWN_NUMBERS:
            return True
        return not torch.equal(torch.default_generator.get_state(), self._torch)


def _next_numbers(python: Any, numpy: Any) -> tuple[int, int, int]:
    return python.getrandbits(64), numpy.random_raw(), numpy.random_raw()


def _known_numbers() -> tuple[int, int, int]:
    python, numpy = python_random.Random(_KNOWN_SEED), np.random.MT19937()
    np.random.RandomState(numpy).seed(_KNOWN_SEED)
    return _next_numbers(python, numpy)


# A number that datasets are unlikely to seed with.
_KNOWN_SEED = 0x77617463
_KNOWN_NUMBERS = _known_numbers()
