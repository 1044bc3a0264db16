"""Copies of tensors in host memory, which the next save reuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftrain import backends
from ftrain.checkpoint.treedef import Leaf
from ftrain.tree import HOST


class Staging:
    """Host buffers of the tensors that were copied last."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copies(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Copy the tensors of leaves to the host; from an accelerator asynchronously: synchronize before reading."""
        buffers = self._buffers if len(self._buffers) == len(leaves) else [torch.empty(0)] * len(leaves)
        self._buffers = [_copy_to_host(leaf.value, buffer) for leaf, buffer in zip(leaves, buffers, strict=True)]
        return [leaf._replace(value=copy) for leaf, copy in zip(leaves, self._buffers, strict=True)]


def _copy_to_host(tensor: Tensor, buffer: Tensor) -> Tensor:
    fits = buffer.dtype == tensor.dtype and buffer.shape == tensor.shape and buffer.stride() == tensor.stride()
    if not fits:
        # Pinned, so that a copy from an accelerator is asynchronous.
        buffer = torch.empty_like(tensor, device=HOST, pin_memory=backends.of(tensor.device).pinned_memory)
    return buffer.copy_(tensor.detach(), non_blocking=True)
