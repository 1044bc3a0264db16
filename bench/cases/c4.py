"""The loss head of a language model alone: time and peak memory."""

from __future__ import annotations

from bench.race import memory_rows, race
from bench.rows import Row
from bench.settings import Settings
from bench.tasks import Entrant

QUESTION = "C4 loss head, 50,257 classes"
PLAIN = Entrant("F.cross_entropy(F.linear)", "head", "bench.heads:plain")
CHUNKED = Entrant("F.linear_cross_entropy, chunked", "head", "bench.heads:torch_fused", options=(("chunked", True),))
ENTRANTS = (
    PLAIN,
    Entrant("F.cross_entropy(F.linear), compiled", "head", "bench.heads:plain", best=True),
    Entrant("F.linear_cross_entropy", "head", "bench.heads:torch_fused"),
    CHUNKED,
    Entrant("ft.losses.linear_cross_entropy", "ours", "bench.heads:ours"),
    Entrant("ft.losses.linear_cross_entropy, compiled", "ours", "bench.heads:ours", best=True),
)
MEASURED = sorted(ENTRANTS, key=lambda entrant: (entrant.best, entrant.name == "F.linear_cross_entropy"))


def run(settings: Settings) -> list[Row]:
    """Time the loss heads, then measure their memory."""
    task = settings.task("head")
    # A step of torch's chunked function takes seconds.
    entrants = [entrant for entrant in ENTRANTS if settings.full or entrant is not CHUNKED]
    # Nothing is updated, so all losses are the same.
    rows = race(QUESTION, task, entrants, settings, fraction=0.15, compared=1)
    return rows + memory_rows(QUESTION, task, settings.limit(MEASURED), settings)
