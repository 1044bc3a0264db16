"""Add notes to an error of a loss that its batch may have caused: NumPy arrays, dtypes, or indices out of range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftrain import tree
from ftrain.tree import dtype_name
from ftrain.types import PyTree

INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8


def add_batch_notes(error: Exception, name: str, params: PyTree, batch: PyTree) -> None:
    """Add notes to an error that the loss `name` raised for these parameters and this batch."""
    named = dict(zip(tree.leaf_names({"batch": batch}), tree.leaves(batch), strict=True))
    arrays = [path for path, leaf in named.items() if isinstance(leaf, np.ndarray)]
    if arrays:
        _note(
            error,
            f"{name}: the batch has NumPy arrays ({', '.join(arrays)}), with which torch does not "
            "compute: convert them with torch.from_numpy, or use ft.data.loader or a DataLoader, which do so",
        )
    if isinstance(error, IndexError | RuntimeError) and any(
        word in str(error) for word in ("out of bounds", "out of range")
    ):
        _note_indices(error, name, named)
    # Each operation words it in its own way: "the same dtype", "Input type and bias type", "for 'Byte'".
    is_about_dtypes = isinstance(error, RuntimeError) and any(word in str(error) for word in ("type", "Byte"))
    pixels = [path for path, leaf in named.items() if isinstance(leaf, Tensor) and leaf.dtype == torch.uint8]
    if pixels and is_about_dtypes:
        _note(
            error,
            f"{name}: the batch has uint8 tensors ({', '.join(pixels)}), which few operations support: convert "
            "inputs to floats, pixels with x.float() / 255, and class indices with y.long()",
        )
    dtypes = {leaf.dtype for leaf in tree.leaves(params) if _is_float(leaf)}
    others = {path: leaf for path, leaf in named.items() if _is_float(leaf) and leaf.dtype not in dtypes}
    if others and dtypes and is_about_dtypes:
        listed = ", ".join(f"{path} is {tree.describe(leaf)}" for path, leaf in others.items())
        needed = " and ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        _note(
            error, f"{name}: {listed}, but the parameters are {needed}: convert the batch, with x.float() for example"
        )


def _note_indices(error: Exception, name: str, named: Mapping[str, Any]) -> None:
    """Add a note with the smallest and the largest integer of each tensor on the host."""
    ranges = [
        f"{path} has values from {int(leaf.min())} to {int(leaf.max())}"
        for path, leaf in named.items()
        if isinstance(leaf, Tensor) and leaf.dtype in INTEGERS and leaf.numel() and leaf.device == tree.HOST
    ]
    if ranges:
        _note(
            error,
            f"{name}: {', '.join(ranges)}: a label must be from 0 to the number of classes - 1, or be the ignore_index "
            "of the loss (-100 by default), and an index of an embedding from 0 to its number of rows - 1",
        )


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _note(error: Exception, text: str) -> None:
    # Not add_note, which an error that is a frozen dataclass refuses.
    vars(error).setdefault("__notes__", []).append(text)
