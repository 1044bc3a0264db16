"""The state with averaged parameters in place of the trained ones."""

from __future__ import annotations

from typing import Literal

from ftrain import tree
from ftrain.errors import StructureError
from ftrain.step.state_checks import require_state
from ftrain.types import TrainState, replace

KINDS = "ema", "swa"


def averaged(state: TrainState, kind: Literal["ema", "swa"] | None = None) -> TrainState:
    """Return the state with the averaged parameters in place of the trained ones, to evaluate or save.

    Args:
        state: of a step with `ema` or `swa`.
        kind: which of the two, ``"ema"`` or ``"swa"``, when the step has both.

    Raises:
        StructureError: when the step of the state has no such wrapper, or both and `kind` is None; for an argument that
            is no state.
    """
    require_state("averaged", state)
    kinds = [name for name in KINDS if name in state.slots]
    if not kinds or (kind is not None and kind not in kinds):
        needed = f"ft.{kind}" if kind in KINDS else "ft.ema(decay) or ft.swa()"
        raise StructureError(f"averaged: the state holds no averages; compose the step with {needed}")
    if kind is None and len(kinds) > 1:
        raise StructureError("averaged: the state holds two averages; say which: averaged(state, 'ema')")
    name = kind or kinds[0]
    averages = state.slots[name]["params"] if name == "swa" else state.slots[name]
    return replace(state, params=tree.map(lambda average, leaf: average.to(leaf.dtype), averages, state.params))
