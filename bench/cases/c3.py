"""A GPT of about the largest size that a CPU can train, in float32 and bfloat16; a quick run has fewer entrants."""

from __future__ import annotations

from bench import registry
from bench.race import memory_rows, race
from bench.rows import Row
from bench.settings import Settings

MEASURED = (registry.HAND_COMPILED, registry.OURS_COMPILED, registry.HAND_EAGER, registry.OURS_EAGER)


def run(settings: Settings) -> list[Row]:
    """Time entrants in both precisions; in a full run, then measure peak memory in float32."""
    rows = []
    for precision in ("fp32", "bf16"):
        hand = (registry.HAND_EAGER, registry.HAND_COMPILED, registry.OURS_EAGER, registry.OURS_COMPILED)
        entrants = registry.main_entrants(settings) if precision == "fp32" or settings.full else hand
        rows += race(
            title(precision),
            settings.task("gpt384", precision),
            entrants,
            settings,
            fraction=0.2,
        )
    if not settings.full:
        return rows
    return rows + memory_rows(title("fp32"), settings.task("gpt384"), MEASURED, settings)


def title(precision: str) -> str:
    """Return the name of the question in a precision."""
    return f"C3 GPT 6x384, {precision}"
