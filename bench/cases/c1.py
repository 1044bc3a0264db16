"""A small MLP, where dispatch and launches dominate."""

from __future__ import annotations

from bench import registry
from bench.compiling import compile_rows
from bench.race import race
from bench.rows import Row
from bench.settings import Settings

QUESTION = "C1 MLP 4x128, batch 64"


def run(settings: Settings) -> list[Row]:
    """Race all, and the hand-written loop a second time in a process of its own; then the time to compile."""
    entrants = (
        *registry.all_entrants(settings, trainers_in_smoke=False),
        registry.OURS_KEEPING,
        registry.HAND_OWN_PROCESS,
    )
    task = settings.task("mlp")
    rows = race(QUESTION, task, entrants, settings, fraction=0.7)
    # A smoke test has seen this on the null model.
    for entrant in () if settings.smoke else (registry.HAND_COMPILED, registry.OURS_COMPILED):
        rows += compile_rows(QUESTION, entrant, task)
    return rows
