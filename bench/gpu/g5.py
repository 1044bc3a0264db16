"""A Llama of 1.2 billion parameters on 4,096 tokens with 128,256 classes, which is limited by memory."""

from __future__ import annotations

import dataclasses

from bench import registry
from bench.gpu import g0
from bench.gpu.g3 import HEAD
from bench.race import race
from bench.rows import Row
from bench.settings import Settings

QUESTION = "G5 Llama 1.2B, 1 x 4,096 tokens, bf16"
LEAN = dataclasses.replace(
    HEAD, name="ftrain, compiled, loss head, remat()", options=(*HEAD.options, ("wrappers", ("remat()",)))
)
# Each state takes 20 GB, so that only a few fit at once. Only entrants of one group take turns.
GROUPS = ((registry.HAND_BEST, registry.OURS_COMPILED, HEAD), (registry.HAND_EAGER, registry.OURS_EAGER), (LEAN,))


def run(settings: Settings) -> list[Row]:
    """Time the entrants in groups, in bf16; compare the losses of all of them."""
    g0.ensure(settings)
    rows: list[Row] = []
    losses: dict[str, list[float]] = {}
    for group in GROUPS:
        rows += race(QUESTION, settings.task("llama", "bf16"), group, settings, fraction=0.2, known=losses)
    return rows
