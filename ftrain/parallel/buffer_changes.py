"""What a step changes in buffers: ranks take the mean of that, so that one that nothing changes keeps its bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain import tree
from ftrain.types import PyTree


def between(old: PyTree, new: PyTree) -> PyTree:
    """Return what has changed in each floating-point buffer; the others have no mean."""

    def change(new: Tensor, old: Tensor) -> Tensor:
        # Infinity minus infinity would be NaN: a mask of attention may hold it.
        return torch.where(new == old, 0, new - old) if new.is_floating_point() else new.new_zeros(())

    return tree.map(change, new, old)


def applied(old: PyTree, new: PyTree, changes: PyTree) -> PyTree:
    """Return the buffers with the changes of all ranks, and as this rank has them where they have no mean."""

    def changed(new: Tensor, old: Tensor, change: Tensor) -> Tensor:
        return old + change.to(old.dtype) if new.is_floating_point() else new

    return tree.map(changed, new, old, changes)
