"""Measure how fast a device multiplies matrices, copies, and launches operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ftrain.profiling.timing import seconds
from ftrain.tree import HOST

SMALLEST_EDGE, LARGEST_EDGE = 256, 8192
LONG_ENOUGH = 0.005
"""Seconds that a square matmul must take for its rate to count, unless it has the largest edge."""

LAUNCHES = 200
REPEATS = 5


def fastest(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of a few runs in seconds, without the first, which may load a library."""
    seconds(work, device)
    return min(seconds(work, device) for _ in range(REPEATS))


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large square matmul of random numbers.

    Equal numbers take less power, and GPUs multiply them faster than any others. No global generator is used.
    """
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(SMALLEST_EDGE, SMALLEST_EDGE, generator=generator, device=HOST).to(device, dtype)
    edge = SMALLEST_EDGE
    while True:
        # Repeated, since so many numbers take seconds to draw.
        matrix = tile.repeat(edge // SMALLEST_EDGE, edge // SMALLEST_EDGE)
        took = fastest(partial(torch.mm, matrix, matrix), device)
        if took >= LONG_ENOUGH or edge >= LARGEST_EDGE:
            return 2 * edge**3 / took
        edge *= 2


def launch_seconds(device: torch.device) -> float:
    """Return the seconds to launch an operation, measured on an addition of one element."""
    one = torch.ones(1, device=device)

    def work() -> None:
        for _ in range(LAUNCHES):
            one + 1

    return fastest(work, device) / LAUNCHES


def copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the bytes per second of a copy, each byte counted once."""
    return source.nbytes / fastest(partial(target.copy_, source), target.device)
