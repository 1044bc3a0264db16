"""Many tensors with the methods of one tensor, and the tensors that the formula of an optimizer gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch

Tensors: TypeAlias = Any
"""A tensor, or a `Column` of tensors."""

ADDITIONS = "add", "add_"


class Column:
    """Tensors of one dtype and device, whose methods are torch's functions for many tensors.

    ``a.lerp_(b, 0.1)`` is ``torch._foreach_lerp_(a, b, 0.1)``. There are no operators, which would allocate memory. In
    graphs, the method is called on one tensor after another, and the compiler fuses the calls.
    """

    __slots__ = ("foreach", "tensors")

    def __init__(self, tensors: list[Tensor], *, eager: bool = True) -> None:
        # In 16 bits, torch's multiplication of many tensors on a CPU (2.13) rounds the number to the dtype: 0.999 to 1.
        self.tensors, self.foreach = tensors, eager and not _torch.foreach_rounds(tensors[0])

    def __getattr__(self, name: str) -> Callable[..., Column]:
        function = getattr(torch, f"_foreach_{name}") if self.foreach else partial(_one_by_one, name)

        def apply(*others: Tensors, **constants: float) -> Column:
            if name in ADDITIONS and isinstance(others[0], Tensor):
                constants = {"alpha": 1}  # Without it, torch treats the tensor as a number, and waits for its value.
            results = function(self.tensors, *[getattr(other, "tensors", other) for other in others], **constants)
            return self if name.endswith("_") else self.like(list(results))

        return apply

    def like(self, tensors: list[Tensor]) -> Column:
        """Return a column of other tensors."""
        return Column(tensors, eager=self.foreach)


@dataclass(slots=True)
class Part:
    """Leaves of one dtype and device, or a single leaf, with their gradients and moments, as a formula gets them.

    The formula writes to the leaves and the moments, and only reads the gradients. `weight_decay` is 0 for leaves that
    the mask excludes; `like` is a tensor of the dtype and device of the leaves, and of their shape if they share one.
    """

    leaf: Tensors
    grad: Tensors
    state: Mapping[str, Tensors]
    weight_decay: Tensor | float
    like: Tensor

    def descent(self, *, maximize: bool, l2: bool = True) -> Tensors:
        """Return the gradient, negated to `maximize` the loss, plus the gradient of the L2 penalty if `l2`."""
        grad = self.grad.neg() if maximize else self.grad
        return grad.add(self.leaf, alpha=self.weight_decay) if l2 and self.weight_decay else grad


def _one_by_one(name: str, tensors: list[Tensor], *others: Any, **constants: float) -> list[Tensor]:
    columns = [other if isinstance(other, list) else [other] * len(tensors) for other in others]
    return [getattr(tensor, name)(*each, **constants) for tensor, *each in zip(tensors, *columns, strict=True)]
