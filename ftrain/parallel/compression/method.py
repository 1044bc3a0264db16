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
    """The ranks that add up their gradients.

    `parts` say how the sum of each leaf is divided over these ranks: None for a sum that every rank needs whole.
    """

    group: Group
    parts: Sequence[Part | None]

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole sums of any tensors over the ranks."""
        return start_sum_all(self.group, tensors)()

    def needed_sums(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the part that this rank needs of the sum of each gradient, which is added in its dtype."""
        return start_scatter_all(self.group, grads, self.parts)()

    def needed(self, index: int, whole: Tensor) -> Tensor:
        """Return the part that this rank needs of the whole sum of the leaf `index`."""
        part = self.parts[index]
        return whole if part is None else part.take(whole, self.group.rank).contiguous()


@dataclass(frozen=True)
class Compression:
    """A way to add up gradients over ranks that does not send all of their bits.

    Args:
        text: what `print(step)` shows for it.
        combine: ``(grads, memories, exchange) -> (sums, memories)``. `grads` are the gradients of this rank, and `sums`
            the parts that it needs of their sums (`Exchange.parts`), in the same dtypes. It must not change its
            arguments.
        sends: what ranks send, with the kind of collective; ``{sum}`` and ``{gather}`` stand for the kinds with which
            `Exchange.needed_sums` and `Group.start_gather` send.
        init: ``(index, leaf, axis) -> Memory``, the first memory of a leaf. `leaf` is a tensor with the shape, dtype
            and device of a rank's gradient. `axis` is the axis along which ranks outside of the group have other blocks
            (the last may be shorter), or None. Default None: the method has no memory.
    """

    text: str
    combine: Callable[[list[Tensor], list[Memory], Exchange], tuple[list[Tensor], list[Memory]]]
    sends: str
    init: Callable[[int, Tensor, int | None], Memory] | None = None


def with_residuals(grads: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients plus their residuals, as new tensors in the dtype of the residuals."""
    return [residual + grad for grad, residual in zip(grads, residuals, strict=True)]


def first_residual(leaf: Tensor) -> Tensor:
    """Return the residual of a leaf before the first step: zeros, in float32 at least.

    In 16 bits a residual would lose the bits that it must keep.
    """
    return torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
