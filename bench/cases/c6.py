"""What `ft.fit` adds to a loop over the same step, on 2,000 steps of the null model."""

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
SHOWN = Entrant("fit, compiled, with progress", "ours", "bench.fitting:fit", options=(("progress", True),))


def run(settings: Settings) -> list[Row]:
    """Race calls of fit against loops of as many steps."""
    return race(
        QUESTION,
        settings.task("null"),
        [HAND, *LOOPS.values(), *FITS.values(), SHOWN],
        settings,
        fraction=0.4,
        steps=20 if settings.tiny else STEPS,
        added=[*((FITS[way], LOOPS[way]) for way in FITS), (SHOWN, LOOPS["compiled"])],
    )
