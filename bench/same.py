"""Before anything is timed: do all entrants compute the same? A case whose maths differs is no comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2}
"""Largest difference of a loss, relative to the reference's and to 1, by precision."""


class MathsError(Exception):
    """Entrants of a case compute different losses."""


def require_same(losses: Mapping[str, Sequence[float]], precision: str) -> float:
    """Compare the losses of the first steps with those of the first entrant, and return the largest difference.

    Raises:
        MathsError: naming who differs by more than the tolerance of the precision, and the losses.
    """
    reference, needed = next(iter(losses.items()))
    tolerance, worst = TOLERANCE[precision], 0.0
    for name, losses_of_entrant in losses.items():
        if len(losses_of_entrant) != len(needed) or not needed:
            raise MathsError(f"{name} gave {len(losses_of_entrant)} losses where {reference} gave {len(needed)}")
        differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses_of_entrant, needed, strict=True)]
        # `max` passes over a NaN that is not its first argument.
        difference = max(differences) if all(map(math.isfinite, differences)) else math.nan
        if not difference <= tolerance:
            raise MathsError(
                f"{name} computes {_shown(losses_of_entrant)} where {reference} computes {_shown(needed)} "
                f"({precision}: {difference:.1e} apart, at most {tolerance:.0e})"
            )
        worst = max(worst, difference)
    return worst


def _shown(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)
