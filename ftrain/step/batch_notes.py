"""Notes on the error of a loss that its batch may have caused: NumPy arrays, bytes, or floats of another dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftrain import tree
from ftrain.tree import dtype_name
from ftrain.types import PyTree


def explain(error: Exception, name: str, params: PyTree, batch: PyTree) -> None:
    """Add a note to the error of a loss where its batch may be the cause.

    Args:
        error: the error that the loss raised.
        name: the name of the loss in the note.
        params: the parameters that the loss got.
        batch: the batch that the loss got.
    """
    named = dict(zip(tree.leaf_names({"batch": batch}), tree.leaves(batch), strict=True))
    arrays = [path for path, leaf in named.items() if isinstance(leaf, np.ndarray)]
    if arrays:
        _note(
            error,
            f"{name}: {_listed(arrays)} in NumPy arrays, which torch does not compute with: convert them with "
            "torch.from_numpy, or take the batches from ft.data.loader or a DataLoader, which do so",
        )
    # Each operation has words of its own for it: "the same dtype", "Input type and bias type", "for 'Byte'".
    is_of_dtypes = isinstance(error, RuntimeError) and any(word in str(error) for word in ("type", "Byte"))
    pixels = [path for path, leaf in named.items() if isinstance(leaf, Tensor) and leaf.dtype == torch.uint8]
    if pixels and is_of_dtypes:
        _note(
            error,
            f"{name}: {_listed(pixels)} uint8, of which torch computes little: convert inputs of the model to floats, "
            "as x.float() / 255 does for pixels, and class indices with y.long()",
        )
    dtypes = {leaf.dtype for leaf in tree.leaves(params) if _is_float(leaf)}
    others = {path: leaf for path, leaf in named.items() if _is_float(leaf) and leaf.dtype not in dtypes}
    if others and dtypes and is_of_dtypes:
        listed = ", ".join(f"{path} is {tree.describe(leaf)}" for path, leaf in others.items())
        needed = " and ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        _note(error, f"{name}: {listed}, and the parameters are {needed}: convert the batch, as x.float() does")


def _listed(paths: list[str]) -> str:
    return f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'}"


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _note(error: Exception, text: str) -> None:
    # Not add_note, which an error that is a frozen dataclass refuses.
    vars(error).setdefault("__notes__", []).append(text)
