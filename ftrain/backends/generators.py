"""Save, seed and restore the random generators of the host and of a device; turn off kernels that draw numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


class Generator(NamedTuple):
    """The functions of a generator that is no `torch.Generator`. The type of its state depends on the device."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]
    manual_seed: Callable[[int], object]


AnyGenerator: TypeAlias = Generator | torch.Generator

LOCK = threading.RLock()
"""Held while the state of a generator is read or set.

Torch holds its own lock of the generator meanwhile. If a second thread read a state then, it would wait for torch's
lock and hold Python's GIL, for which the first thread waits: a deadlock.
"""


def save_generators(*devices: AnyGenerator) -> Callable[[], None]:
    """Save the states of the generators of host and device, and return a function that restores them."""
    generators: tuple[Any, ...] = torch.default_generator, *devices
    with LOCK:
        states = [generator.get_state() for generator in generators]

    def restore() -> None:
        with LOCK:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    return restore


class seeded:  # noqa: N801
    """Context in which the generators of host and device are seeded; their states are restored when it ends."""

    __slots__ = ("_device_generators", "_device_states", "_host_state", "_seed")

    def __init__(self, seed: int, *devices: AnyGenerator) -> None:
        self._seed, self._device_generators = seed, devices

    # Every eager step does this, mostly with the host's generator alone, so it makes as few calls as possible.
    def __enter__(self) -> None:
        with LOCK:
            self._host_state = torch.default_generator.get_state()
            generators = self._device_generators
            self._device_states = [generator.get_state() for generator in generators] if generators else []
            torch.default_generator.manual_seed(self._seed)
            for generator in generators:
                generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        with LOCK:
            torch.default_generator.set_state(self._host_state)
            if self._device_generators:
                for generator, state in zip(self._device_generators, self._device_states, strict=True):
                    generator.set_state(state)


@contextmanager
def seeded_then_launched(launch: Callable[[], object], seed: int, generator: AnyGenerator) -> Iterator[None]:
    """As `seeded`, on a device that queues operations lazily: the end of the context launches them."""
    with seeded(seed, generator):
        try:
            yield
        finally:
            launch()


@contextmanager
def without_fused_draws() -> Iterator[None]:
    """Context in which attention and recurrent nets run as separate operations, dropout among them, in all threads.

    The fused kernels of GPUs draw the random numbers of dropout by themselves. Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html, and
    https://docs.pytorch.org/docs/stable/backends.html#torch-backends-cudnn (MIOpen has the same switch).
    """
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cudnn.enabled = enabled
