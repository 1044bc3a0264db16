"""A small GPT, whose time is mostly matrix products: time and peak memory."""

from __future__ import annotations

from bench import registry
from bench.compiling import compile_rows
from bench.race import memory_rows, race
from bench.rows import Row
from bench.settings import Settings

QUESTION = "C2 GPT 4x128"
MEASURED = (
    registry.HAND_COMPILED,
    registry.OURS_COMPILED,
    registry.HAND_EAGER,
    registry.OURS_EAGER,
    registry.OURS_KEEPING,
)


def run(settings: Settings) -> list[Row]:
    """Time all entrants, then measure peak memory and, in a full run, compilation."""
    task = settings.task("gpt128")
    rows = race(
        QUESTION, task, [*registry.all_entrants(settings), *registry.onednn_loop(settings)], settings, fraction=0.5
    )
    rows += memory_rows(QUESTION, task, settings.limit(MEASURED), settings)
    # A quick run measures compilation on the MLP only, which takes a tenth of the time.
    for entrant in (registry.HAND_COMPILED, registry.OURS_COMPILED) if settings.full else ():
        rows += compile_rows(QUESTION, entrant, task)
    return rows
