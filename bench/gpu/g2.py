"""GPT-2 124M at batches of one and four, where launches still take a part of the time."""

from __future__ import annotations

from bench import registry
from bench.gpu import g0
from bench.race import race
from bench.rows import Row
from bench.settings import Settings

FEW = (registry.HAND_EAGER, registry.HAND_BEST, registry.HAND_GRAPH_BEST, registry.OURS_COMPILED, registry.OURS_COMBO)
ALL = (*FEW, registry.HAND_UPDATE, registry.HAND_GRAPH, registry.OURS_EAGER)


def run(settings: Settings) -> list[Row]:
    """Time entrants in bf16 at both batches."""
    g0.ensure(settings)
    rows = []
    for batch, entrants in ((4, ALL), (1, FEW)):
        question = f"G2 GPT-2 124M, batch {batch}, bf16"
        rows += race(question, settings.task(f"gpt2 b{batch}", "bf16"), entrants, settings, fraction=0.7)
    return rows
