"""A GPT of a size that a CPU can just train, in float32 and in bfloat16."""

from __future__ import annotations

from bench import field
from bench.race import memory_rows, race
from bench.rows import Row
from bench.settings import Settings

MEASURED = (field.HAND_COMPILED, field.OURS_COMPILED, field.HAND_EAGER, field.OURS_EAGER)


def run(settings: Settings) -> list[Row]:
    """Race all in both precisions; then peak memory in float32."""
    rows = []
    for precision in ("fp32", "bf16"):
        entrants = field.everyone(settings, smoke=False)
        rows += race(title(precision), settings.task("gpt384", precision), entrants, settings, part=0.2)
    task = settings.task("gpt384")
    return rows + memory_rows(title("fp32"), task, MEASURED, settings)


def title(precision: str) -> str:
    """The name of the question in a precision."""
    return f"C3 GPT 6x384, {precision}"
