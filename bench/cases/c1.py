"""A small MLP, whose time is mostly dispatch and launches of kernels."""

from __future__ import annotations

from bench import registry
from bench.compiling import compile_rows
from bench.race import race
from bench.rows import Row
from bench.settings import Settings

QUESTION = "C1 MLP 4x128, batch 64"


def run(settings: Settings) -> list[Row]:
    """Time all entrants, and the eager loop again in a process of its own, as a control; then measure compilation."""
    entrants = (
        *registry.all_entrants(settings, trainers_in_smoke=False),
        registry.OURS_KEEPING,
        registry.HAND_OWN_PROCESS,
    )
    task = settings.task("mlp")
    rows = race(QUESTION, task, entrants, settings, fraction=0.7)
    # A smoke test measures compilation on the null model only.
    for entrant in () if settings.smoke else (registry.HAND_COMPILED, registry.OURS_COMPILED):
        rows += compile_rows(QUESTION, entrant, task)
    return rows
