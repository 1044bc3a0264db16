"""How fast a device is: matrix products, copies, and launches of operations that compute next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ftrain.profiling.timing import seconds

SMALLEST_EDGE, LARGEST_EDGE = 256, 8192
LONG_ENOUGH = 0.005
"""Seconds that the square product must take whose rate counts, unless it has the largest edge."""

LAUNCHES = 200
REPEATS = 5


def fastest(work: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of a few runs; the first, which may load a library, does not count."""
    seconds(work, device)
    return min(seconds(work, device) for _ in range(REPEATS))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large square matrix product."""
    edge, took = SMALLEST_EDGE, 0.0
    while True:
        matrix = torch.ones(edge, edge, device=device, dtype=dtype)
        took = fastest(partial(torch.mm, matrix, matrix), device)
        if took >= LONG_ENOUGH or edge >= LARGEST_EDGE:
            return 2 * edge**3 / took
        edge *= 2


def product_seconds(device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
    """Return the seconds of a product ``(rows, inner) @ (inner, columns)``; axes are cut to `LARGEST_EDGE`."""
    rows, inner, columns = (min(length, LARGEST_EDGE) for length in (rows, inner, columns))
    left, right = (torch.ones(shape, device=device, dtype=dtype) for shape in ((rows, inner), (inner, columns)))
    return fastest(partial(torch.mm, left, right), device)


def launch_seconds(device: torch.device) -> float:
    """Return the seconds of an operation that computes next to nothing."""
    one = torch.ones(1, device=device)

    def work() -> None:
        for _ in range(LAUNCHES):
            one + 1

    return fastest(work, device) / LAUNCHES


def copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the bytes per second of a copy, each byte counted once."""
    return source.nbytes / fastest(partial(target.copy_, source), target.device)
