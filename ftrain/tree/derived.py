"""States that are derived from another state, and share tensors with it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from ftrain.types import DERIVED, TrainState, replace


def derived(state: TrainState, **changes: Any) -> TrainState:
    """Return a copy of a state with changed fields, which is consumed when the state is.

    Both share tensors, which a step overwrites if the state is donated to it.
    """
    new = replace(state, **changes)
    DERIVED.setdefault(state, WeakSet())
    # Also registered with the states that `state` was derived from: if `state` is freed, its entry is lost.
    for original, sharing in [*DERIVED.items()]:
        if original is state or state in sharing:
            sharing.add(new)
    return new
