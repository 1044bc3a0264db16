"""The averaged parameters of a state, in place of the trained ones."""

from __future__ import annotations

from ftrain import tree
from ftrain.errors import StructureError
from ftrain.types import TrainState, replace

KINDS = "ema", "swa"


def averaged(state: TrainState, kind: str | None = None) -> TrainState:
    """Return the state with the averaged parameters in place of the trained ones, to evaluate or save.

    Args:
        state: of a step with `ema` or `swa`.
        kind: which of the two, ``"ema"`` or ``"swa"``, when the step has both.

    Raises:
        StructureError: when the state was made by a step without such a wrapper, or with both and nothing was said.
    """
    found = [name for name in KINDS if name in state.slots]
    if not found or (kind is not None and kind not in found):
        wanted = f"ft.{kind}" if kind in KINDS else "ft.ema(decay) or ft.swa()"
        raise StructureError(f"averaged: the state holds no averages; compose the step with {wanted}")
    if kind is None and len(found) > 1:
        raise StructureError("averaged: the state holds two averages; say which: averaged(state, 'ema')")
    slot = state.slots[kind or found[0]]
    averages = slot["params"] if (kind or found[0]) == "swa" else slot
    return replace(state, params=tree.map(lambda average, leaf: average.to(leaf.dtype), averages, state.params))
