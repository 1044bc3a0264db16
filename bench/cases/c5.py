"""What each wrapper adds to a plain step: in microseconds to one without work, as a ratio to one with."""

from __future__ import annotations

import dataclasses

from bench.race import Race, memory_rows, race
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
# Where bfloat16 is emulated, little else would be seen of a stack.
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
    """Race wrappers alone and stacked, on both models; then kinds of remat, in time and memory."""
    null = _wrappers(NULL, settings, "null", ALONE)
    gpt = _wrappers(GPT, settings, "gpt128", ALONE)
    return null + gpt + _remat(settings)


def _wrappers(question: str, settings: Settings, problem: str, names: tuple[str, ...]) -> list[Row]:
    # The null model holds no blocks to compute twice, and its batch of one cannot be cut.
    left_out = {"remat()", "accumulate(2)"} if problem == "null" else set()
    alone = [_with(name, (name,)) for name in names if name not in left_out]
    stack = tuple(name for name in STACK if name not in left_out)
    stacked = [_with("all, donated()", (*stack, "donated()")), _with("all, compiled()", (*stack, "compiled()"))]
    print(question, flush=True)
    # Only the first loss is compared: wrappers that change the update change those after it.
    contest = Race(question, settings.task(problem, "fp32"), settings, checked=1, tolerance="bf16")
    try:
        contest.enter([PLAIN, *alone, *stacked])
        times = contest.time(rounds=settings.share(0.7 if problem == "null" else 0.3))
        for entrant in [*alone, *stacked]:
            contest.added(times, entrant.name, PLAIN.name)
    finally:
        contest.close()
    return contest.rows


def _remat(settings: Settings) -> list[Row]:
    entrants = [KEEPING_ALL]
    for name, options in REMATS.items():
        if settings.tiny and options.get("blocks"):
            options = {"blocks": options["blocks"][:1]}
        entrants.append(Entrant(name, "ours", "bench.ours:rematerialised", options=tuple(options.items())))
    task = settings.task("gpt128")
    rows = race(REMAT, task, entrants, settings, part=0.4)
    return rows + memory_rows(REMAT, task, entrants[:2] if settings.smoke else entrants, settings)


def _with(name: str, wrappers: tuple[str, ...]) -> Entrant:
    return dataclasses.replace(PLAIN, name=name, options=(("wrappers", wrappers),))
