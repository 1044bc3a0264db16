"""The overhead of launches: the null model and many leaves, with and without captured graphs."""

from __future__ import annotations

from bench import registry
from bench.race import race
from bench.rows import SKIPPED, Row, unmeasured
from bench.settings import Settings

NULL = "G1 null model"
GRAPHED = (registry.HAND_GRAPH, registry.HAND_GRAPH_BEST)
OURS = (registry.OURS_EAGER, registry.OURS_COMPILED, registry.OURS_UNGRAPHED, registry.OURS_GRAPHED)
OURS_SWEPT = (registry.OURS_EAGER, registry.OURS_UNGRAPHED, registry.OURS_GRAPHED, registry.OURS_COMBO)
SWEPT = (registry.HAND_EAGER, registry.HAND_GRAPH, *OURS_SWEPT)
COUNTS = (10, 100, 1_000)


def run(settings: Settings) -> list[Row]:
    """Time the null model, then models with more and more leaves."""
    peers = registry.TRAINERS if settings.peers and not settings.smoke else ()
    rows = race(NULL, settings.task("null"), (*registry.HAND, *GRAPHED, *OURS, *peers), settings)
    for count in COUNTS:
        rows += race(f"G1 {count:,} leaves", settings.task(f"leaves {count}"), SWEPT, settings, fraction=0.5)
    question = "G1 10,000 leaves"
    eager = (registry.HAND_EAGER, registry.HAND_GRAPH, registry.OURS_EAGER)
    rows += race(question, settings.task("leaves 10000"), eager, settings, fraction=0.2)
    return [
        *rows,
        unmeasured(question, registry.OURS_COMPILED.name, SKIPPED, "compiling 10,000 leaves takes many minutes"),
    ]
