"""One rank that NCCL connects with nobody: what data parallelism costs before anything travels."""

from __future__ import annotations

from bench.cases import c11
from bench.rows import Row
from bench.settings import Settings


def run(settings: Settings) -> list[Row]:
    """Race the levels against no mesh, DDP and FSDP2."""
    return c11.race_on(1, "G6 GPT, one rank", (c11.NO_MESH, *c11.PEERS, *map(c11.ours, (0, 1, 3))), settings)
