"""The check that what stands for a state is one."""

from __future__ import annotations

from typing import Any

from ftrain.errors import StructureError
from ftrain.types import TrainState


def require_state(function: str, state: Any) -> None:
    """Check that an argument is a state.

    Raises:
        StructureError: naming the function, and what was found.
    """
    if not isinstance(state, TrainState):
        raise StructureError(f"{function}: the state is {type(state).__name__}; needs the TrainState of step.init()")
