"""States that are made of another one, and share tensors with it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from ftrain.types import DERIVED, TrainState, replace


def derived(state: TrainState, **changes: Any) -> TrainState:
    """Return a state with other fields, which is consumed with the old one: a donated step overwrites both."""
    new = replace(state, **changes)
    DERIVED.setdefault(state, WeakSet())
    # Also with those that it was made of: it may be freed before.
    for other, sharing in [*DERIVED.items()]:
        if other is state or state in sharing:
            sharing.add(new)
    return new
