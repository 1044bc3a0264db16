"""Parameters that the loss does not use: an error, which on many ranks is known when all have computed their part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

from ftrain import tree
from ftrain.errors import LossError
from ftrain.types import PyTree


class UnusedOnRank:
    """What one rank does not use in a step; while it watches, such parameters have a gradient of 0 without an error.

    Args:
        names: of the parameters that train, in their order.
        is_first: whether this is a step in which ranks compare what they do.
    """

    def __init__(self, names: Sequence[str], is_first: bool) -> None:
        self.names, self.is_first = names, is_first
        self.loss, self.is_allowed = "", True
        self.calls: list[set[int]] = []
        """For each backward pass the numbers of the parameters that it does not use."""
        self._gathered: dict[str, bool] = {}

    def note_gathered(self, names: Sequence[str], are_used: Sequence[bool]) -> None:
        """Note which parameters a backward pass uses that have a gradient anyway: that of other ranks."""
        for name, is_used in zip(names, are_used, strict=True):
            self._gathered[name] = self._gathered.get(name, False) or is_used

    def note_call(self, unused: Sequence[int], loss: str, is_allowed: bool) -> None:
        """Note the end of a backward pass.

        Args:
            unused: the numbers of parameters without a gradient.
            loss: its name.
            is_allowed: whether parameters may be unused.
        """
        only_gathered = {index for index, name in enumerate(self.names) if self._gathered.get(name) is False}
        self.calls.append({*unused, *only_gathered})
        self.loss, self.is_allowed, self._gathered = loss, is_allowed, {}


_watching: ContextVar[UnusedOnRank | None] = ContextVar("ftrain_unused", default=None)


watching = _watching.get
"""``() -> UnusedOnRank | None``: what watches on this rank; None where one rank computes alone."""


@contextmanager
def watched(names: Sequence[str], is_first: bool) -> Iterator[UnusedOnRank]:
    """Context in which unused parameters are noted and have a gradient of 0."""
    unused = UnusedOnRank(names, is_first)
    token = _watching.set(unused)
    try:
        yield unused
    finally:
        _watching.reset(token)


def refuse_unused(loss: str, params: PyTree, indices: Sequence[int]) -> NoReturn:
    """Raise the error for parameters that a loss does not use, of which these are the numbers.

    Raises:
        LossError: always.
    """
    names = tree.leaf_names(params)
    raise LossError(
        f"{loss}: the loss does not use {len(indices)} of {len(names)} parameters: {listed(params, indices)}; use "
        "them, freeze them with trainable=, or allow it with train_step(..., allow_unused=True)"
    )


def listed(params: PyTree, indices: Sequence[int]) -> str:
    """Return the names of some parameters as a text."""
    names = tree.leaf_names(params)
    text = ", ".join(names[index] for index in indices[: tree.MAX_LISTED])
    return f"{text}, ..." if len(indices) > tree.MAX_LISTED else text
