"""The backward pass on one of many ranks: gradients combined during the pass, and parameters without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeAlias

from torch import Tensor

from ftrain._context import setting

Backward: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""``tensors -> gradients``: runs the backward pass of a loss; None for a tensor that the loss does not use."""


class CombinedGrads(Protocol):
    """Combines the gradients of one forward pass, whose loss reads other leaves than the parameters it is given."""

    def backward(self, run: Backward) -> list[Tensor | None]:
        """Run the backward pass; return the combined gradients of the parameters, in their order."""
        ...


_announced: ContextVar[CombinedGrads | None] = ContextVar("ftrain_combined_grads", default=None)


announced = _announced.get
"""``() -> CombinedGrads | None``: the argument of the last call of `announce`."""


def announce(combined: CombinedGrads | None) -> None:
    """Set the object that runs the backward pass of the current forward pass; the loss calls this.

    None means the usual backward pass.
    """
    _announced.set(combined)


class UnusedOnRank:
    """Records the parameters that the loss does not use on this rank. They get a gradient of 0, and no error is raised.

    `names` are the names of the trainable parameters in their order. `is_first` is whether ranks compare their records.
    """

    def __init__(self, names: Sequence[str], is_first: bool) -> None:
        self.names, self.is_first = names, is_first
        self.loss, self.is_allowed = "", True
        self.calls: list[set[int]] = []
        """The indices of the unused parameters, for each backward pass."""
        self._gathered: dict[str, bool] = {}

    def note_gathered(self, names: Sequence[str], are_used: Sequence[bool]) -> None:
        """Record which gathered parameters this rank uses. They get a gradient from the other ranks in any case."""
        for name, is_used in zip(names, are_used, strict=True):
            self._gathered[name] = self._gathered.get(name, False) or is_used

    def note_call(self, unused: Sequence[int], loss: str, is_allowed: bool) -> None:
        """Record the end of a backward pass: the indices of the parameters without a gradient."""
        only_gathered = {index for index, name in enumerate(self.names) if self._gathered.get(name) is False}
        self.calls.append({*unused, *only_gathered})
        self.loss, self.is_allowed, self._gathered = loss, is_allowed, {}


_unused_on_rank: ContextVar[UnusedOnRank | None] = ContextVar("ftrain_unused", default=None)


unused_on_rank = _unused_on_rank.get
"""``() -> UnusedOnRank | None``: the record of this rank; None if one rank computes alone."""


@contextmanager
def recording_unused(names: Sequence[str], is_first: bool) -> Iterator[UnusedOnRank]:
    """Context in which unused parameters are recorded and have a gradient of 0."""
    unused = UnusedOnRank(names, is_first)
    with setting(_unused_on_rank, unused):
        yield unused
