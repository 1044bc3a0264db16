"""Gradients that a loss combines with those of other ranks while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Protocol, TypeAlias

from torch import Tensor

Backward: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""``tensors -> gradients``: runs the backward pass of a loss; None for a tensor that the loss does not use."""


class CombinedGrads(Protocol):
    """What combines the gradients of one forward pass: the loss reads other leaves than the parameters it is given."""

    def backward(self, run: Backward) -> list[Tensor | None]:
        """Run the backward pass; return the combined gradients of the parameters, in their order."""
        ...


_announced: ContextVar[CombinedGrads | None] = ContextVar("ftrain_combined_grads", default=None)


announced = _announced.get
"""``() -> CombinedGrads | None``: what the loss that has just run has announced."""


def announce(combined: CombinedGrads | None) -> None:
    """Say, in a loss, what runs the backward pass of this call and knows its gradients; None when it is known."""
    _announced.set(combined)
