"""Where the ranks of a run come into a step: what each computes on, and when they combine their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from ftrain.step.wrapper import OnGrad
from ftrain.types import PyTree, TrainState

OnRanks: TypeAlias = Callable[
    [TrainState, PyTree, int],
    tuple[TrainState, PyTree, Callable[[], AbstractContextManager[Any]], Callable[[TrainState], TrainState]],
]
"""`ftrain.step.wrapper.OnStep.on_ranks`."""


def one_rank(state: TrainState, batch: PyTree, microbatches: int) -> Any:
    """Compute on the whole state and batch."""
    return state, batch, nullcontext, lambda new: new


def order(parts: Sequence[OnGrad]) -> list[OnGrad]:
    """Put what combines the gradients of ranks behind the leading parts that take a batch in pieces."""
    within = [part for part in parts if not part.across_ranks]
    count = next((index for index, part in enumerate(within) if part.microbatches is None), len(within))
    return [*within[:count], *(part for part in parts if part.across_ranks), *within[count:]]
