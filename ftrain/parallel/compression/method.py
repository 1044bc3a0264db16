"""The interface of a compression method: how ranks add up their gradients, and what each keeps between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part, start_scatter_all, start_sum_all

Memory: TypeAlias = dict[str, Tensor]
"""What a method keeps for one leaf between steps, by name; empty if it keeps nothing."""

RESIDUAL = "residual"
"""The name of the part of its gradients that a rank has not sent yet. It differs between the ranks that add them up;
everything else in a `Memory` is equal on all of them."""


@dataclass(frozen=True)
class Exchange:
    """The ranks that add up their gradients, and how each sum is divided over them; None for one that all need."""

    group: Group
    parts: Sequence[Part | None]

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole sums of any tensors over the ranks."""
        return start_sum_all(self.group, tensors)()

    def needed_sums(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return what this rank needs of the sums of all gradients, which are added in their dtype."""
        return start_scatter_all(self.group, grads, self.parts)()

    def needed(self, index: int, whole: Tensor) -> Tensor:
        """Return what this rank needs of the whole sum of a leaf, given by its number."""
        part = self.parts[index]
        return whole if part is None else part.take(whole, self.group.rank).contiguous()


@dataclass(frozen=True)
class Compression:
    """A way to add up gradients over ranks that does not send all of their bits.

    Args:
        text: text that prints for it.
        combine: ``(grads, memories, exchange) -> (sums, memories)``. `grads` are the gradients of this rank, `sums`
            what the exchange says that it needs of their sums, in the same dtypes. It must not change its arguments.
        sends: what ranks send, with the kind of collective; ``{sum}`` and ``{gather}`` stand for the kinds with which
            `Exchange.needed_sums` and `Group.start_gather` send.
        init: ``(index, leaf, axis) -> Memory``, the first memory of a leaf, given its number, a tensor with the shape,
            dtype and device of a rank's gradient, and the axis along which ranks outside of the group have
            other blocks (the last may be shorter), or None. Default None: the method has no memory.
    """

    text: str
    combine: Callable[[list[Tensor], list[Memory], Exchange], tuple[list[Tensor], list[Memory]]]
    sends: str
    init: Callable[[int, Tensor, int | None], Memory] | None = None


def with_residuals(grads: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
    """Return new tensors: gradients plus what was not sent of earlier ones, in the dtype of the residuals."""
    return [residual + grad for grad, residual in zip(grads, residuals, strict=True)]


def no_residual(leaf: Tensor) -> Tensor:
    """Return the residual of a leaf before the first step: zeros, in float32 at least.

    In 16 bits a residual would lose the bits that it must keep.
    """
    return torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
