"""A deep GPT: how long its graph takes to compile, as a whole and block by block, and how long a step takes then."""

from __future__ import annotations

from bench import registry
from bench.compiling import compile_rows
from bench.race import race
from bench.rows import Row
from bench.settings import Settings
from bench.tasks import Entrant

QUESTION = "C14 GPT 12x128"
HAND = Entrant("loop, torch.compile(block)", "hand compile", "bench.loops:compiled_blocks")
OURS = Entrant("ftrain, compiled by block", "ours", "bench.ours:compiled", options=(("lowering", "blocks"),))
COMPILED = (registry.HAND_COMPILED, HAND, registry.OURS_COMPILED, OURS)


def run(settings: Settings) -> list[Row]:
    """Time the steps; then measure compilation, except in a smoke test."""
    task = settings.task("deep")
    rows = race(QUESTION, task, (registry.HAND_EAGER, registry.OURS_EAGER, *COMPILED), settings, fraction=0.5)
    for entrant in () if settings.smoke else COMPILED:
        rows += compile_rows(QUESTION, entrant, task)
    return rows
