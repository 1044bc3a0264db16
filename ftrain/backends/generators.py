"""The random generators of the host and of a device: save, seed and restore their states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def seeded(seed: int, *devices: Generator) -> Iterator[None]:
    """Context in which the generators of the host and of a device are seeded; it restores them when it ends."""
    generators = HOST, *devices
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
