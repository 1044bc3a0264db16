"""The random generators of the host and of a device: save, seed and restore their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Generator(NamedTuple):
    """The functions of one generator, of which only the device's module knows how its state looks."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]
    manual_seed: Callable[[int], object]


def functions_of(generator: torch.Generator) -> Generator:
    """Return the functions of a generator of torch."""
    return Generator(generator.get_state, generator.set_state, generator.manual_seed)


HOST = functions_of(torch.default_generator)


def save_generators(*devices: Generator) -> Callable[[], None]:
    """Save the states of the generators of the host and of a device, and return a function that restores them."""
    generators = HOST, *devices
    states = [generator.get_state() for generator in generators]

    def restore() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return restore


class seeded:  # noqa: N801
    """Context in which the generators of the host and of a device are seeded; it restores them when it ends."""

    __slots__ = ("_devices", "_restore", "_seed")

    def __init__(self, seed: int, *devices: Generator) -> None:
        self._seed, self._devices = seed, devices

    def __enter__(self) -> None:
        self._restore = save_generators(*self._devices)
        for generator in (HOST, *self._devices):
            generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        self._restore()
