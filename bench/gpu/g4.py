"""Bert-large on 4 x 512 tokens, 512 samples: the workload of transformers' guide to training on one GPU.

The guide measured 57.82 s and 14,949 MB in float32 on a V100, with dropout; here there is none, so that losses can be
compared. Techniques are timed alone and together.
"""

from __future__ import annotations

import dataclasses

from bench import registry
from bench.gpu import g0
from bench.race import race
from bench.rows import TIME, Row
from bench.settings import Settings
from bench.tasks import Entrant

SAMPLES = 512
COMPILED, EAGER, HAND = registry.OURS_COMPILED, registry.OURS_EAGER, registry.HAND_EAGER


def _with(base: Entrant, *wrappers: str) -> Entrant:
    name = f"{base.name}, {', '.join(wrappers)}"
    return dataclasses.replace(base, name=name, options=(("wrappers", wrappers),))


ACCUMULATED, REMAT = "accumulate(4)", "remat()"
ENTRANTS = {
    "bf16": (HAND, EAGER, _with(EAGER, REMAT), _with(EAGER, ACCUMULATED), _with(EAGER, REMAT, ACCUMULATED)),
    # Separate, because compilation takes minutes.
    "bf16, compiled": (HAND, registry.HAND_BEST, COMPILED, _with(COMPILED, REMAT, ACCUMULATED)),
    "fp32": (HAND, EAGER, _with(EAGER, ACCUMULATED), _with(EAGER, REMAT)),
    "tf32": (HAND, EAGER, COMPILED),
}


def run(settings: Settings) -> list[Row]:
    """Time each technique in each precision that the device has."""
    g0.ensure(settings)
    rows = []
    for variant, entrants in ENTRANTS.items():
        precision = variant.split(",")[0]
        if precision == "tf32" and settings.torch_device.type != "cuda":
            continue
        question = f"G4 bert-large, 4 x 512, {variant}"
        rows += race(question, settings.task("bert", precision), entrants, settings, fraction=0.3)
    return rows + [_samples(row, settings) for row in rows if row.metric == TIME]


def _samples(row: Row, settings: Settings) -> Row:
    """Return the row of the guide's metric: seconds for 512 samples."""
    steps = SAMPLES / settings.task("bert").sizes.batch
    values = {name: getattr(row, name) * steps / 1e6 for name in ("p20", "median", "p80")}
    return dataclasses.replace(row, metric=f"{SAMPLES} samples", unit="s", **values)
