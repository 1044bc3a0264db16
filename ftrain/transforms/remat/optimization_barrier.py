"""Keep a compiler from moving a recomputation from the backward pass into the forward pass of a captured step.

In a graph with both passes nothing delays a recomputation: its inputs exist early, so Inductor fuses it with the
forward pass and keeps its results. As XLA's ``optimization_barrier``, this is a copy that depends on a gradient, in a
custom operation that compilers treat as a black box.
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


_after.register_fake(lambda value, gradient: value.clone())
# It saves no tensors, so that a recomputation finds as many as the first run.
_after.register_autograd(lambda ctx, grad: (grad, None))


def is_in(graph: fx.GraphModule) -> bool:
    """Return whether a captured graph has such a barrier."""
    return any(node.target is torch.ops.ftrain.after.default for node in graph.graph.nodes)


def after(gradient: Tensor, values: PyTree) -> PyTree:
    """Return a tree whose tensors are copies that a compiler computes only after a gradient.

    Parameters are not copied, because a copy would take more memory than it saves.
    """
    tensors = [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    # If some are computed, copies of these are enough; else all of them are parameters and inputs.
    has_computed = any(not leaf.is_leaf for leaf in tensors)
    # A tensor that occurs twice stays one tensor.
    copies: dict[int, Tensor] = {}

    def delayed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (leaf.is_leaf if has_computed else leaf.requires_grad):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = torch.ops.ftrain.after(leaf, gradient)
        return copies[id(leaf)]

    return tree.map(delayed, values)
