"""Keep a compiler from doing in the forward pass of a captured step what is there to be done in the backward pass.

In a graph that holds both passes nothing says when a recomputation happens: all that it needs is there early, and
Inductor makes one kernel of it and of the forward pass, whose results it then keeps. XLA has an operation against that
(``optimization_barrier``); this is the same for torch: a copy that needs a gradient, and that no compiler looks into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ftrain import tree
from ftrain.types import PyTree


@torch.library.custom_op("ftrain::after", mutates_args=())
def _after(value: Tensor, gradient: Tensor) -> Tensor:
    return value.clone()


@_after.register_fake
def _(value: Tensor, gradient: Tensor) -> Tensor:
    return value.clone()


def is_in(graph: fx.GraphModule) -> bool:
    """Whether something in a captured graph waits for a gradient."""
    return any(node.target is torch.ops.ftrain.after.default for node in graph.graph.nodes)


def after(gradient: Tensor, values: PyTree) -> PyTree:
    """Return values that are there only after a gradient is.

    Parameters stay as they are, for a copy of them would be larger than what it saves.

    Args:
        gradient: any tensor.
        values: a tree in which something besides tensors may be.
    """
    found = [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    computed = any(not leaf.is_leaf for leaf in found)
    # One that is there twice stays one tensor.
    made: dict[int, Tensor] = {}

    def delayed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (leaf.is_leaf if computed else leaf.requires_grad):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _Delayed.apply(leaf, gradient)  # type: ignore[no-untyped-call]
        return made[id(leaf)]

    return tree.map(delayed, values)


class _Delayed(torch.autograd.Function):
    """That recomputation finds as many tensors kept for the backward pass as there were: none here."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Tensor) -> Tensor:
        return torch.ops.ftrain.after(value, gradient)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
