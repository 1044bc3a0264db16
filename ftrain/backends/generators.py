"""Save, seed and restore the random generators of the host and of a device."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any, NamedTuple

import torch


class Generator(NamedTuple):
    """The functions of one generator. The type of its state depends on the device."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]
    manual_seed: Callable[[int], object]


def functions_of(generator: torch.Generator) -> Generator:
    """Return the functions of a generator of torch."""
    return Generator(generator.get_state, generator.set_state, generator.manual_seed)


HOST = functions_of(torch.default_generator)

_get_state = methodcaller("get_state")


def save_generators(*devices: Generator) -> Callable[[], None]:
    """Save the states of the generators of host and device, and return a function that restores them."""
    generators = HOST, *devices
    states = [generator.get_state() for generator in generators]

    def restore() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return restore


class seeded:  # noqa: N801
    """Context in which the generators of host and device are seeded; their states are restored when it ends."""

    __slots__ = ("_generators", "_seed", "_states")

    def __init__(self, seed: int, *devices: Generator) -> None:
        self._seed, self._generators = seed, (HOST, *devices)

    # Every eager step does this, so it does not make the extra calls of `save_generators`.
    def __enter__(self) -> None:
        self._states = [*map(_get_state, self._generators)]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
