"""Random numbers of samples: they depend only on the seed, the epoch and the index of the sample."""

from __future__ import annotations

import functools
import random as python_random
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from ftrain import random

ORDER, WINDOW, SAMPLE, COLLATION = range(4)
"""The purposes of random numbers in an epoch; each has its own key, and so independent numbers."""

# The bytes "data", folded into the key of the seed: users are unlikely to fold this number into a key of the same seed.
_DATA = 0x64617461


@functools.lru_cache(maxsize=64)
def stream(seed: int, epoch: int, purpose: int) -> tuple[int, int]:
    """Return the key data for a purpose in an epoch."""
    base = random.fold_in_key_data(random.key_data(random.key(seed)), _DATA)
    return random.fold_in_key_data(random.fold_in_key_data(base, epoch), purpose)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators of torch, Python and numpy for the sample with this index."""
    _seed(random.fold_in_key_data(stream(seed, epoch, SAMPLE), index))


def seed_collation(seed: int, epoch: int, index: int) -> None:
    """Seed the generators for the collation of the batch whose first sample has this index."""
    _seed(random.fold_in_key_data(stream(seed, epoch, COLLATION), index))


def _seed(key_data: tuple[int, int]) -> None:
    """Seed the global generators of torch, Python and numpy."""
    number = random.seed_of(key_data)
    # Not torch.manual_seed, which also seeds the devices, even in workers.
    torch.default_generator.manual_seed(number)
    python_random.seed(number)
    # Not `_SPARE`, whose state must stay that of its copy, by which `PreservedState` detects draws.
    mtrand.set_bit_generator(_SEEDED)
    # One number of 32 bits: to seed numpy with an array takes six times as long.
    np.random.seed(key_data[0])


class PreservedState:
    """Context that restores the global generators of torch, Python and numpy; `detect` makes `has_drawn` possible.

    One thing is not restored: ``np.random.randn`` computes two normal numbers at once, and may have kept the second.
    """

    __slots__ = ("_detect", "_numpy", "_python", "_resets", "_torch", "_torch_numbers")

    def __init__(self, *, detect: bool = False) -> None:
        self._detect = detect

    def __enter__(self) -> PreservedState:
        self._torch = torch.default_generator.get_state()
        self._python = _PythonState.now()
        # Another generator takes its place in this context: to copy its state takes a hundred times as long.
        self._numpy = mtrand.get_bit_generator()
        if self._detect:
            self._resets, self._torch_numbers = _SPARE.resets, _next_numbers_of_torch()
            torch.default_generator.set_state(self._torch)
            mtrand.set_bit_generator(_SPARE.generator)
        else:
            mtrand.set_bit_generator(_SEEDED)
        return self

    def __exit__(self, *error: object) -> None:
        torch.default_generator.set_state(self._torch)
        self._python.restore()
        mtrand.set_bit_generator(self._numpy)

    def has_drawn(self) -> bool:
        """Whether a global generator was used or set in this context; may be called only once.

        It does not detect code that draws and then restores the earlier state, or sets a state of an earlier batch.
        """
        return (
            # Called first, and so in any case: it also restores the generator.
            _SPARE.has_drawn()
            or _SPARE.resets != self._resets
            or self._python.has_drawn()
            or _next_numbers_of_torch() != self._torch_numbers
        )


_MEMORY = np.empty(2)
_NUMBERS = torch.from_numpy(_MEMORY)


def _next_numbers_of_torch() -> bytes:
    """Return the next two normal numbers of torch's global generator, as bytes.

    To compare these takes a third of the time of comparing states. Two, because the generator may hold the first number
    since an earlier draw; the second one then depends on the rest of its state.
    """
    _NUMBERS.normal_()
    return _MEMORY.tobytes()


class _PythonState:
    """A state of Python's global generator, from `random.getstate`.

    `random.getstate` takes longer than reading a small sample. So the state that was restored last is kept. If the next
    numbers are those that follow this state, nothing has drawn since, and it is still the current state.
    """

    __slots__ = ("_after", "_first", "_second", "_state")

    _last: _PythonState | None = None

    def __init__(self, state: tuple[Any, tuple[int, ...], float | None]) -> None:
        self._state = state
        python_random.setstate(state)
        self._first, self._second = python_random.getrandbits(32), python_random.getrandbits(32)
        self._after = python_random.getrandbits(64)

    @classmethod
    def now(cls) -> _PythonState:
        """Return the current state, and advance the generator by two words of 32 bits."""
        last = cls._last
        words = last._words_until_another() if last is not None else 0
        if last is not None and words is None:
            return last
        version, memory, normal = python_random.getstate()
        # Undo the draws of `_words_until_another`: the generator computes 624 words at once, and the last element of
        # its memory counts the words that were drawn. This fails if these draws began a new block of words and the
        # first word was the expected one by chance: once in 2**41 times.
        cls._last = state = cls((version, (*memory[:-1], max(memory[-1] - (words or 0), 0)), normal))
        state.restore()
        python_random.getrandbits(64)
        return state

    def _words_until_another(self) -> int | None:
        """Draw up to two words. Return None if this is the current state, else the number of words drawn."""
        if _GENERATOR.gauss_next != self._state[2]:
            return 0
        if python_random.getrandbits(32) != self._first:
            return 1
        return None if python_random.getrandbits(32) == self._second else 2

    def restore(self) -> None:
        python_random.setstate(self._state)

    def has_drawn(self) -> bool:
        """Whether the generator has been used after `now`."""
        return python_random.getrandbits(64) != self._after or _GENERATOR.gauss_next != self._state[2]


_GENERATOR: Any = python_random.getstate.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of Python's module `random`."""

_SEEDED = np.random.MT19937(0)
"""The global generator of numpy while samples draw."""


class _Spare:
    """The global generator of numpy while samples that may draw are read, and a copy of it in the same state.

    When a draw has made their states differ, the generator gets the state of the copy, and `resets` increases by one.
    """

    def __init__(self) -> None:
        self.generator, self._copy, self.resets = np.random.MT19937(0), np.random.MT19937(0), 0

    def has_drawn(self) -> bool:
        """Whether the generator has been used since the last call; advances it and its copy by one number."""
        if self.generator.random_raw() == self._copy.random_raw():
            return False
        self.generator.state, self.resets = self._copy.state, self.resets + 1
        return True


_SPARE = _Spare()
