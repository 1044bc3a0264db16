"""The time that `ft.fit` adds to a loop over the same step, for 2,000 steps of the null model."""

from __future__ import annotations

from bench.race import race
from bench.rows import Row
from bench.settings import Settings
from bench.tasks import Entrant

QUESTION, STEPS = "C6 fit, null model", 2_000
EAGER = (("compile", False),)
HAND = Entrant("loop by hand, with clip", "hand eager", "bench.loops:eager")
LOOPS = {
    "eager": Entrant("loop over the eager step", "ours", "bench.ours:eager"),
    "compiled": Entrant("loop over the compiled step", "ours", "bench.ours:compiled"),
}
FITS = {
    "eager": Entrant("fit, eager", "ours", "bench.fitting:fit", options=EAGER),
    "compiled": Entrant("fit, compiled", "ours", "bench.fitting:fit"),
}
WITH_PROGRESS = Entrant("fit, compiled, with progress", "ours", "bench.fitting:fit", options=(("progress", True),))


def run(settings: Settings) -> list[Row]:
    """Time calls of `ft.fit`, and loops of as many steps."""
    return race(
        QUESTION,
        settings.task("null"),
        [HAND, *LOOPS.values(), *FITS.values(), WITH_PROGRESS],
        settings,
        fraction=0.4,
        steps=20 if settings.tiny else STEPS,
        added=[*((FITS[mode], LOOPS[mode]) for mode in FITS), (WITH_PROGRESS, LOOPS["compiled"])],
    )
