"""Measure how fast a device multiplies matrices, copies, and launches operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ftrain.profiling.timing import seconds
from ftrain.tree import HOST

SMALLEST_EDGE, LARGEST_EDGE = 256, 8192
LONG_ENOUGH = 0.005
"""Seconds that a matmul must take for an exact rate; only the largest may take less."""

LAUNCHES = 200
REPEATS = 5


def fastest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few runs, without the first, which may load a library."""
    seconds(work, device)
    return min(seconds(work, device) for _ in range(REPEATS))


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large square matmul.

    Of random numbers, because GPUs need less power for equal numbers, and multiply them faster. They are drawn from a
    generator of its own, so torch's global state does not change.
    """
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(SMALLEST_EDGE, SMALLEST_EDGE, generator=generator, device=HOST).to(device, dtype)
    edge = SMALLEST_EDGE
    while True:
        # A tile is repeated, because drawing a whole matrix takes seconds.
        matrix = tile.repeat(edge // SMALLEST_EDGE, edge // SMALLEST_EDGE)
        duration = fastest(partial(torch.mm, matrix, matrix), device)
        if duration >= LONG_ENOUGH or edge >= LARGEST_EDGE:
            return 2 * edge**3 / duration
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
