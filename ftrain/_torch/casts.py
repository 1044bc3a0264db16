"""Find the tensor of which another one is a view or a cast."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ftrain._torch import private_names

with private_names():
    _ = Tensor._base


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which another one is a view, for autograd; the tensor itself if it is not a view."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def cast_from(tensor: Tensor) -> tuple[Any, int] | None:
    """Return the node of autograd, and the number of its output, of which a tensor is a cast; None if it is not."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    source: tuple[Any, int] = node.next_functions[0]
    return source
