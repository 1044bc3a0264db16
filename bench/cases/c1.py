"""A small MLP, where dispatch and launches dominate."""

from __future__ import annotations

from bench import field
from bench.compiling import compile_rows
from bench.race import race
from bench.rows import Row
from bench.settings import Settings

QUESTION = "C1 MLP 4x128, batch 64"


def run(settings: Settings) -> list[Row]:
    """Race all, and the hand-written loop a second time in a process of its own; then the time to compile."""
    entrants = (*field.everyone(settings, smoke=False), field.OURS_KEEPING, field.HAND_OWN_PROCESS)
    task = settings.task("mlp")
    rows = race(QUESTION, task, entrants, settings, part=0.7)
    # A smoke test has seen this on the null model.
    for entrant in () if settings.smoke else (field.HAND_COMPILED, field.OURS_COMPILED):
        rows += compile_rows(QUESTION, entrant, task)
    return rows
