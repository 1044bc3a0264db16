"""A fast check that tensors have the shapes, strides, dtypes and devices of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ftrain import _torch


class Guard:
    """Checks whether tensors have the shapes, strides, dtypes and devices of those that it was made from.

    Torch compares in C++, in about 40 ns for each tensor. The check also fails in another context
    (`torch.inference_mode`, say), so a failure means that the caller must compare the tensors itself.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._check = _torch.tensor_guard(tensors)
        self._count = len(tensors)

    def __call__(self, tensors: Sequence[Any]) -> bool:
        """Return whether `tensors` are like those that this was made from."""
        return len(tensors) == self._count and self._check(*tensors)
