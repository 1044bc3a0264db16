"""Copies of tensors in host memory, which the next save reuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftrain import backends
from ftrain.tree import HOST


class Staging:
    """Host buffers of the tensors that were copied last."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the host; from an accelerator asynchronously: synchronize before reading."""
        buffers = self._buffers if len(self._buffers) == len(tensors) else [torch.empty(0)] * len(tensors)
        self._buffers = [_copy_to_host(tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True)]
        return list(self._buffers)


def _copy_to_host(tensor: Tensor, buffer: Tensor) -> Tensor:
    fits = buffer.dtype == tensor.dtype and buffer.shape == tensor.shape and buffer.stride() == tensor.stride()
    if not fits:
        # Pinned, so that a copy from an accelerator is asynchronous.
        buffer = torch.empty_like(tensor, device=HOST, pin_memory=backends.of(tensor.device).pinned_memory)
    return buffer.copy_(tensor.detach(), non_blocking=True)
