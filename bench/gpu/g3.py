"""GPT-2 124M at a batch that fills a GPU, and loss heads alone."""

from __future__ import annotations

import dataclasses

from bench import registry
from bench.cases import c4
from bench.gpu import g0
from bench.race import race
from bench.rows import Row
from bench.settings import Settings

QUESTION = "G3 GPT-2 124M, batch 64, bf16"
HEAD = dataclasses.replace(registry.OURS_COMPILED, name="ftrain, compiled, loss head", options=(("fused_head", True),))
HEADS = [entrant for entrant in c4.ENTRANTS if "F.linear_cross_entropy" not in entrant.name]
ENTRANTS = (registry.HAND_EAGER, registry.HAND_BEST, registry.OURS_EAGER, registry.OURS_COMPILED, HEAD)


def run(settings: Settings) -> list[Row]:
    """Time entrants in bf16, with those trainers (with their best options) that are installed; then the loss heads."""
    g0.ensure(settings)
    peers = (
        [entrant for entrant in registry.TRAINERS if entrant.best and not entrant.own_process] if settings.peers else []
    )
    rows = race(QUESTION, settings.task("gpt2 b64", "bf16"), (*ENTRANTS, *peers), settings, fraction=0.4)
    heads = "G3 loss head, 50,257 classes, bf16"
    return rows + race(heads, settings.task("head", "bf16"), HEADS, settings, fraction=0.4, compared=1)
