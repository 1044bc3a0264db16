"""A check before anything is timed: all entrants of a question must compute the same losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2}
"""Largest accepted difference of a loss by precision, divided by the reference's loss or by 1 if that is larger."""


class LossMismatchError(Exception):
    """Entrants of a question compute different losses."""


def require_same_losses(losses: Mapping[str, Sequence[float]], precision: str) -> float:
    """Compare the losses of each entrant with those of the first one, and return the largest relative difference.

    `losses` has the losses of the first steps by name of the entrant.

    Raises:
        LossMismatchError: if an entrant differs by more than the tolerance of the precision, has another number of
            losses, or one that is not finite.
    """
    reference, expected = next(iter(losses.items()))
    tolerance, largest = TOLERANCE[precision], 0.0
    for name, actual in losses.items():
        if len(actual) != len(expected) or not expected:
            raise LossMismatchError(f"{name} gave {len(actual)} losses where {reference} gave {len(expected)}")
        differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(actual, expected, strict=True)]
        # A NaN is caught here because `max` ignores one that is not its first argument.
        difference = max(differences) if all(map(math.isfinite, differences)) else math.nan
        if not difference <= tolerance:
            raise LossMismatchError(
                f"{name} computes {_format(actual)} where {reference} computes {_format(expected)} "
                f"({precision}: {difference:.1e} apart, at most {tolerance:.0e})"
            )
        largest = max(largest, difference)
    return largest


def _format(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)
