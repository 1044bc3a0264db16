"""One rank with NCCL: the cost of data parallelism without any communication."""

from __future__ import annotations

from bench.cases import c11
from bench.rows import Row
from bench.settings import Settings


def run(settings: Settings) -> list[Row]:
    """Time the levels, no mesh, and what torch and Accelerate have for many ranks."""
    return c11.race_on(1, "G6 GPT, one rank", (c11.NO_MESH, *c11.PEERS, *map(c11.ours, (0, 1, 3))), settings)
