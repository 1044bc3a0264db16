"""In-memory data: a tree of arrays whose first axis is the samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ftrain import tree
from ftrain.errors import DataError
from ftrain.types import PyTree


class ArrayDataset(Dataset[PyTree]):
    """A map-style dataset made by `arrays`."""

    draws = False

    def __init__(self, data: PyTree, length: int) -> None:
        self._data, self._length = data, length

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def rows(self, indices: Sequence[int]) -> PyTree:
        """Return several samples as one tree, stacked on a new first axis, as ``default_collate`` would."""
        index = np.asarray(indices, dtype=np.int64)
        return tree.map(
            lambda leaf: leaf[torch.from_numpy(index)] if isinstance(leaf, Tensor) else torch.as_tensor(leaf[index]),
            self._data,
        )

    def __getitem__(self, index: int) -> PyTree:
        # Indexing a range raises the IndexError of a list, which ends `for sample in arrays(...)`.
        row = range(self._length)[index]
        # Rows of numpy are copied: torch warns about read-only memory.
        return tree.map(
            lambda leaf: leaf[row] if isinstance(leaf, Tensor) else torch.as_tensor(np.array(leaf[row])), self._data
        )


def arrays(data: PyTree) -> ArrayDataset:
    """Return a dataset whose sample i is the same tree with row i of every leaf, as a tensor.

    Args:
        data: a tree (a dict, say) of tensors or numpy arrays, memory-mapped ones included, all of one length.

    Raises:
        DataError: if a leaf is not an array, has no axis, or has another length; the message names it.

    >>> arrays({"x": torch.arange(6).view(3, 2), "y": np.array([5, 6, 7])})[1]
    {'x': tensor([2, 3]), 'y': tensor(6)}
    """
    lengths: dict[str, int] = {}
    for name, leaf in zip(tree.leaf_names(data), tree.leaves(data), strict=True):
        if not isinstance(leaf, Tensor | np.ndarray) or not leaf.ndim:
            raise DataError(f"arrays: {tree.path('data', name)} is {tree.describe(leaf)}; needs arrays with an axis")
        lengths[name] = len(leaf)
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{tree.path('data', name)}: {length}" for name, length in lengths.items())
        raise DataError(f"arrays: needs arrays of one length, one row for each sample; found {listed or 'none'}")
    # A plain array: the rows of a np.memmap take three times as long.
    data = tree.map(lambda leaf: leaf if isinstance(leaf, Tensor) else np.asarray(leaf), data)
    return ArrayDataset(data, next(iter(lengths.values())))
