"""A check before anything is timed: all entrants of a question must compute the same losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2}
"""Largest accepted difference of a loss by precision, divided by the reference's loss or by 1 if that is larger."""
TOLERANCE_OF_CHANGE = {"fp32": 0.01, "tf32": 0.1, "bf16": 0.2}
"""The same, divided by the change of the reference's loss in the compared steps, if it trains.

Where a few steps hardly change the loss, it is nearly that of an entrant with another rate, or without any update.
"""
ROUNDING = 1e-6
"""A difference that rounding in float32 can make, in the measure of `TOLERANCE`."""


class LossMismatchError(Exception):
    """Entrants of a question compute different losses."""


def require_same_losses(losses: Mapping[str, Sequence[float]], precision: str) -> float:
    """Compare the losses of each entrant with those of the first one, and return the largest relative difference.

    `losses` has the losses of the first steps by name of the entrant.

    Raises:
        LossMismatchError: if an entrant differs by more than the tolerances of the precision, has another number of
            losses, or one that is not finite.
    """
    reference, expected = next(iter(losses.items()))
    tolerance, largest = TOLERANCE[precision], 0.0
    changes = [abs(b - expected[0]) / max(1.0, abs(b)) for b in expected]
    if changes and max(changes) > ROUNDING:
        tolerance = min(tolerance, max(ROUNDING, TOLERANCE_OF_CHANGE[precision] * max(changes)))
    for name, actual in losses.items():
        if len(actual) != len(expected) or not expected:
            raise LossMismatchError(f"{name} gave {len(actual)} losses where {reference} gave {len(expected)}")
        differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(actual, expected, strict=True)]
        # A NaN is caught here because `max` ignores one that is not its first argument.
        difference = max(differences) if all(map(math.isfinite, differences)) else math.nan
        if not difference <= tolerance:
            raise LossMismatchError(
                f"{name} computes {_format(actual)} where {reference} computes {_format(expected)} "
                f"({precision}: {difference:.1e} apart, at most {tolerance:.1e})"
            )
        largest = max(largest, difference)
    return largest


def _format(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)
