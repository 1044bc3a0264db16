"""What each wrapper costs: microseconds added to a step without work, and the ratio to a step with work."""

from __future__ import annotations

import dataclasses

from bench.race import memory_rows, race
from bench.rows import Row
from bench.settings import Settings
from bench.tasks import Entrant

NULL, GPT, REMAT = "C5 wrappers, null model", "C5 wrappers, GPT 4x128", "C5 remat, GPT 4x128"
PLAIN = Entrant("plain step", "ours", "bench.ours:wrapped")
ALONE = (
    'with_amp("bf16")',
    "remat()",
    "accumulate(2)",
    "clip(1.0)",
    "ema(0.99)",
    "skip_nonfinite()",
    "donated()",
    "compiled()",
)
# "auto" and not "bf16": a CPU that emulates bfloat16 would spend most of the time of the stack on that.
STACK = ('with_amp("auto")', "remat()", "accumulate(2)", "clip(1.0)", "ema(0.99)", "skip_nonfinite()")
KEEPING_ALL = Entrant("no remat", "ours", "bench.ours:eager")
REMATS = {
    "remat()": {},
    'remat("dots")': {"policy": "dots"},
    "remat() of three blocks": {"blocks": ("blocks.0", "blocks.1", "blocks.2")},
    "remat() of two blocks": {"blocks": ("blocks.0", "blocks.1")},
    "remat() of two blocks and a half": {"blocks": ("blocks.0", "blocks.1", "blocks.2.feed")},
    "remat() of feed-forwards": {"blocks": tuple(f"blocks.{index}.feed" for index in range(4))},
}


def run(settings: Settings) -> list[Row]:
    """Time wrappers alone and stacked, on both models; then time variants of remat and measure their memory."""
    # The null model has no blocks for remat, and its batch of one example cannot be divided.
    null = _wrappers(NULL, settings, "null", fraction=0.7, left_out={"remat()", "accumulate(2)"})
    gpt = _wrappers(GPT, settings, "gpt128", fraction=0.3, left_out=set())
    return null + gpt + _remat(settings)


def _wrappers(question: str, settings: Settings, problem: str, *, fraction: float, left_out: set[str]) -> list[Row]:
    alone = [_with(name, (name,)) for name in ALONE if name not in left_out]
    stack = tuple(name for name in STACK if name not in left_out)
    stacked = [_with("all, donated()", (*stack, "donated()")), _with("all, compiled()", (*stack, "compiled()"))]
    wrapped = [*alone, *stacked]
    return race(
        question,
        settings.task(problem),
        [PLAIN, *wrapped],
        settings,
        fraction=fraction,
        compared=1,  # Some wrappers change the update, and so the later losses.
        tolerance="bf16",
        added=[(entrant, PLAIN) for entrant in wrapped],
    )


def _remat(settings: Settings) -> list[Row]:
    entrants = [KEEPING_ALL]
    for name, options in REMATS.items():
        if settings.tiny and options.get("blocks"):
            options = {"blocks": options["blocks"][:1]}
        entrants.append(Entrant(name, "ours", "bench.ours:rematerialised", options=tuple(options.items())))
    task = settings.task("gpt128")
    rows = race(REMAT, task, entrants, settings, fraction=0.4)
    return rows + memory_rows(REMAT, task, entrants[:2] if settings.smoke else entrants, settings)


def _with(name: str, wrappers: tuple[str, ...]) -> Entrant:
    return dataclasses.replace(PLAIN, name=name, options=(("wrappers", wrappers),))
