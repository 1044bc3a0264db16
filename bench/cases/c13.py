"""Adapters of rank 8 on all linear maps in the blocks of a GPT, compared with peft: time and peak memory."""

from __future__ import annotations

from bench import registry
from bench.ours import trainable_percent
from bench.race import memory_rows, race
from bench.rows import Row, measured
from bench.settings import Settings
from bench.tasks import Entrant

ALL_PARAMETERS = Entrant("ftrain, all parameters", "ours", "bench.ours:eager")
ADAPTED = Entrant("ftrain, eager", "ours", "bench.ours:adapted")
ADAPTED_COMPILED = Entrant("ftrain, compiled", "ours", "bench.ours:adapted", best=True)
PROBLEMS = {"gpt128": "GPT 4x128", "gpt384": "GPT 6x384"}


def run(settings: Settings) -> list[Row]:
    """Time adapters that start with the same values; then measure memory, also of a step that trains all parameters."""
    rows = []
    peers = (registry.PEFT, registry.PEFT_COMPILED) if settings.peers else ()
    for problem, name in PROBLEMS.items():
        question, task = f"C13 LoRA of rank 8, {name}", settings.task(problem)
        rows += race(question, task, (*peers, ADAPTED, ADAPTED_COMPILED), settings, fraction=0.5)
    share = measured(question, ADAPTED.name, "trainable share", "%", [trainable_percent(task)])
    entrants = [ADAPTED] if settings.smoke else [*peers[:1], ADAPTED, ALL_PARAMETERS]
    return [*rows, share, *memory_rows(question, task, entrants, settings)]
