"""An evaluation compared with a loop by hand, eager and compiled, for models dominated by calls and by products."""

from __future__ import annotations

from bench.race import race
from bench.rows import Row
from bench.settings import Settings
from bench.tasks import Entrant

HAND = Entrant("loop over batches", "hand eager", "bench.evaluation:by_hand")
HAND_COMPILED = tuple(
    Entrant(
        f"loop over batches, torch.compile({what})",
        "hand compile",
        "bench.evaluation:by_hand",
        options=(("compile", what),),
    )
    for what in ("model", "loss")
)
OURS = Entrant("evaluate", "ours", "bench.evaluation:evaluate")
OURS_COMPILED = Entrant("evaluate, compiled", "ours", "bench.evaluation:evaluate", options=(("compile", True),))
PROBLEMS = {"mlp": "MLP 4x128, batch 64", "gpt128": "GPT 4x128", "gpt384": "GPT 6x384"}


def run(settings: Settings) -> list[Row]:
    """Time evaluations of eight batches."""
    rows = []
    for problem, name in PROBLEMS.items():
        entrants = (HAND, *HAND_COMPILED, OURS, OURS_COMPILED)
        rows += race(f"C12 evaluation, {name}", settings.task(problem), entrants, settings, fraction=0.4)
    return rows
