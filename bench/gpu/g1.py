"""Launches alone: the null model and many leaves, with and without captured graphs."""

from __future__ import annotations

from bench import field
from bench.race import race
from bench.rows import SKIPPED, Row, said
from bench.settings import Settings

NULL = "G1 null model"
GRAPHED = (field.HAND_GRAPH, field.HAND_GRAPH_BEST)
OURS = (field.OURS_EAGER, field.OURS_COMPILED, field.OURS_UNGRAPHED, field.OURS_GRAPHED)
OURS_SWEPT = (field.OURS_EAGER, field.OURS_UNGRAPHED, field.OURS_GRAPHED, field.OURS_COMBO)
SWEPT = (field.HAND_EAGER, field.HAND_GRAPH, *OURS_SWEPT)
COUNTS = (10, 100, 1_000)


def run(settings: Settings) -> list[Row]:
    """Race on the null model, then sweep the number of leaves."""
    peers = field.TRAINERS if settings.peers and not settings.smoke else ()
    rows = race(NULL, settings.task("null"), (*field.HAND, *GRAPHED, *OURS, *peers), settings)
    for count in COUNTS:
        rows += race(f"G1 {count:,} leaves", settings.task(f"leaves {count}"), SWEPT, settings, part=0.5)
    question = "G1 10,000 leaves"
    eager = (field.HAND_EAGER, field.HAND_GRAPH, field.OURS_EAGER)
    rows += race(question, settings.task("leaves 10000"), eager, settings, part=0.2)
    return [*rows, said(question, field.OURS_COMPILED.name, SKIPPED, "compiling 10,000 leaves takes many minutes")]
