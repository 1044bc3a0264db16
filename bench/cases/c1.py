"""A small MLP, where dispatch and launches dominate."""

from __future__ import annotations

from bench import field
from bench.race import race
from bench.rows import Row
from bench.settings import Settings

QUESTION = "C1 MLP 4x128, batch 64"


def run(settings: Settings) -> list[Row]:
    """Race all, and the hand-written loop a second time in a process of its own, to see what that does."""
    entrants = (*field.everyone(settings, smoke=False), field.OURS_KEEPING, field.HAND_APART)
    return race(QUESTION, settings.task("mlp"), entrants, settings)
