"""Ask cheaply whether tensors are of the kind that something was worked out for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ftrain import _torch


class Guard:
    """Whether tensors have the shapes, strides, dtypes and devices of the first ones.

    Torch compares in C++, at about 40 ns a tensor. A false answer may also come from a changed context
    (`torch.inference_mode`, say), so it means "look closer".
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._check = _torch.tensor_guard(tensors)
        self._count = len(tensors)

    def __call__(self, tensors: Sequence[Any]) -> bool:
        """Return whether `tensors` are like the first ones."""
        return len(tensors) == self._count and self._check(*tensors)
