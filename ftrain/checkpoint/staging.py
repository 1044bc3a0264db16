"""Copies of tensors in host memory that is used again for the next save."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftrain import backends
from ftrain.checkpoint.treedef import Leaf
from ftrain.tree.ops import HOST


class Staging:
    """Host memory of the shapes that were copied last."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def copies(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Copy the tensors of leaves to the host; from a device without waiting for it."""
        free = self._held if len(self._held) == len(leaves) else [torch.empty(0)] * len(leaves)
        self._held = [_copied(leaf.value, held) for leaf, held in zip(leaves, free, strict=True)]
        return [leaf._replace(value=copy) for leaf, copy in zip(leaves, self._held, strict=True)]


def _copied(tensor: Tensor, held: Tensor) -> Tensor:
    fits = held.dtype == tensor.dtype and held.shape == tensor.shape and held.stride() == tensor.stride()
    if not fits:
        # Pinned, so that the copy of a device needs no stop on its way.
        held = torch.empty_like(tensor, device=HOST, pin_memory=backends.of(tensor.device).pinned_memory)
    return held.copy_(tensor.detach(), non_blocking=True)
