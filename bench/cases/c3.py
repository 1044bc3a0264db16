"""A GPT of a size that a CPU can just train, in float32 and in bfloat16; who races is fewer unless the run is full."""

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
        hand = (field.HAND_EAGER, field.HAND_COMPILED, field.OURS_EAGER, field.OURS_COMPILED)
        entrants = field.few(settings) if precision == "fp32" or settings.full else hand
        rows += race(
            title(precision),
            settings.task("gpt384", precision),
            entrants,
            settings,
            part=0.2,
        )
    if not settings.full:
        return rows
    return rows + memory_rows(title("fp32"), settings.task("gpt384"), MEASURED, settings)


def title(precision: str) -> str:
    """The name of the question in a precision."""
    return f"C3 GPT 6x384, {precision}"
