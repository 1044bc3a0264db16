"""GPT-2 124M at a batch that fills a GPU."""

from __future__ import annotations

import dataclasses

from bench import field
from bench.gpu import g0
from bench.race import race
from bench.rows import Row
from bench.settings import Settings

QUESTION = "G3 GPT-2 124M, batch 64, bf16"
HEAD = dataclasses.replace(field.OURS_COMPILED, name="ftrain, compiled, loss head", options=(("fused_head", True),))
ENTRANTS = (field.HAND_EAGER, field.HAND_BEST, field.OURS_EAGER, field.OURS_COMPILED, HEAD)


def run(settings: Settings) -> list[Row]:
    """Race in bf16; trainers at their best take part where they are installed."""
    g0.ensure(settings)
    peers = [one for one in field.TRAINERS if one.best and not one.in_own_process] if settings.peers else []
    return race(QUESTION, settings.task("gpt2 b64", "bf16"), (*ENTRANTS, *peers), settings, part=0.4)
