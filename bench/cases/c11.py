"""Many devices: ranks connected by gloo, each a process with one thread, compared with torch and Accelerate.

Every rank trains the same GPT on its rows of the batch, with AdamW and clipping. Each entrant has ranks of its own. The
time of a turn is that of its slowest rank. Peak memory is that of the rank with the highest peak in three steps, minus
what is resident after the training is deleted.
"""

from __future__ import annotations

from functools import partial

from bench import registry
from bench.race import memory_rows, race
from bench.ranks import TIMEOUT, RankRacer, peak
from bench.rows import Row
from bench.settings import Settings
from bench.tasks import Entrant

STEPS = 5
"""The number of steps in a turn."""

CODE = "bench.data_parallel:"
ALONE = Entrant("loop, no communication", "control", "bench.loops:eager", compares_losses=False)
BOUND = Entrant("loop, bare exchanges of level 1", "control", f"{CODE}exchanging", compares_losses=False)
DDP = (Entrant("DDP", "torch", f"{CODE}ddp"), Entrant("DDP, best", "torch", f"{CODE}ddp", best=True))
ZERO = (
    Entrant("DDP, ZeroRedundancyOptimizer", "torch", f"{CODE}zero"),
    Entrant("DDP, ZeroRedundancyOptimizer, best", "torch", f"{CODE}zero", best=True),
)
FSDP = Entrant("FSDP2 by block", "torch", f"{CODE}fsdp")
FSDP_COMPILED = tuple(
    Entrant(
        f"FSDP2 by block, compiled {what}",
        "torch compile",
        f"{CODE}fsdp",
        timeout=TIMEOUT,
        options=(("compiled", what),),
    )
    for what in ("blocks", "model")
)
NO_MESH = registry.OURS_EAGER
ONE_RANK = "C11 GPT, one rank"


def ours(level: int) -> Entrant:
    """Return the entrant of the donated step at a level."""
    return Entrant(f"ftrain, level {level}", "ours", "bench.ours:eager", options=(("level", level),))


COMPILED = Entrant("ftrain, compiled, level 3", "ours", "bench.ours:compiled", timeout=TIMEOUT, options=(("level", 3),))
PEERS = (*DDP, registry.ACCELERATE_FUSED, *ZERO, FSDP)


def run(settings: Settings) -> list[Row]:
    """Time entrants on 2 and 4 ranks, eager and compiled, and on one rank with and without a mesh."""
    eager = (*PEERS, ALONE, BOUND, *map(ours, (0, 1, 3)))
    compiled = (FSDP, *FSDP_COMPILED, COMPILED)
    if settings.smoke:  # One race, since ranks take seconds to start.
        return race_on(2, "C11 GPT, 2 ranks", (*eager, *compiled[-2:]), settings)
    rows = []
    for size in (2, 4):
        rows += race_on(size, f"C11 GPT, {size} ranks", eager, settings)
        rows += memory_rows(
            f"C11 GPT, {size} ranks",
            settings.task(f"ranks {size}"),
            (FSDP, ours(3)),
            settings,
            partial(peak, size=size),
        )
        rows += race_on(size, f"C11 GPT, compiled, {size} ranks", compiled, settings)
    return rows + race_on(1, ONE_RANK, (NO_MESH, *map(ours, (0, 3))), settings)


def race_on(size: int, question: str, entrants: tuple[Entrant, ...], settings: Settings) -> list[Row]:
    """Time entrants, each on `size` ranks."""
    task, make = settings.task(f"ranks {size}"), partial(RankRacer, size=size)
    return race(question, task, entrants, settings, fraction=0.6, steps=1 if settings.smoke else STEPS, make=make)
