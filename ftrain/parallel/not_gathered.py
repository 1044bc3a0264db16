"""Placeholder for a parameter that is not gathered: a shape without values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import LossError


class NotGathered(Tensor):
    """A parameter of a block outside the block's forward, where each rank has only its part.

    Its shape, dtype and device can be read. An operation on it in the backward pass, where `torch.utils.checkpoint`
    computes a part of the block again, gathers it; any other raises a LossError.
    """

    _name: str
    _gather: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, name: str, shape: Sequence[int], local: Tensor, gather: Callable[[], Tensor]) -> Self:
        """Return a placeholder for a parameter of this whole shape, of which this rank has the part `local`."""
        # What is computed again must save the same tensors, so it requires a gradient if the parameter does.
        self: Self = _torch.tensor_without_values(cls, shape, local, requires_grad=local.requires_grad)
        self._name, self._gather = name, gather
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call an operation on the gathered parameter."""
        args, kwargs = tree.map(lambda leaf: leaf._whole() if isinstance(leaf, cls) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _whole(self) -> Tensor:
        if _torch.in_backward():
            return self._gather()
        raise LossError(
            f"sharded: the loss reads the parameter {self._name} outside of the forward of its block, and level 3 "
            "gathers it only there; read it there, or use level=2"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Return its name and shape."""
        return f"NotGathered({self._name}, {list(self.shape)})"
