"""Many tensors at once, with the methods of one tensor, and what an optimizer updates at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch

Some: TypeAlias = Any
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

        def apply(*others: Some, **constants: float) -> Column:
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
    """What a formula gets: leaves of one dtype and device, or a single leaf, with their gradients and moments.

    It writes the leaves and the moments, and only reads the gradients. `weight_decay` is 0 where a mask says so;
    `like` is one of the leaves.
    """

    leaf: Some
    grad: Some
    state: Mapping[str, Some]
    weight_decay: float
    like: Tensor

    def descent(self, *, maximize: bool, l2: bool = True) -> Some:
        """Return the gradient to descend: negated to `maximize` the loss, and with that of weight decay if `l2`."""
        grad = self.grad.neg() if maximize else self.grad
        return grad.add(self.leaf, alpha=self.weight_decay) if l2 and self.weight_decay else grad


def _one_by_one(name: str, tensors: list[Tensor], *others: Any, **constants: float) -> list[Tensor]:
    columns = [other if isinstance(other, list) else [other] * len(tensors) for other in others]
    return [getattr(tensor, name)(*each, **constants) for tensor, *each in zip(tensors, *columns, strict=True)]
