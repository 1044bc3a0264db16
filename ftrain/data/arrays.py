"""In-memory data: a tree of arrays, whose first axis is that of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ftrain import tree
from ftrain.errors import DataError
from ftrain.types import PyTree


class Arrays(Dataset[PyTree]):
    """A map-style dataset made by `arrays`."""

    draws = False

    def __init__(self, data: PyTree, length: int) -> None:
        self._data, self._length = data, length

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def rows(self, index: Sequence[int]) -> PyTree:
        """Return several samples as one tree, with an axis more in front: what collating them would give."""
        places = np.asarray(index, dtype=np.int64)
        return tree.map(lambda leaf: _rows(leaf, places), self._data)

    def __getitem__(self, index: int) -> PyTree:
        # As a list would say it, so that `for sample in arrays(...)` ends.
        place = range(self._length)[index]
        return tree.map(lambda leaf: _sample(leaf, place), self._data)


def arrays(data: PyTree) -> Arrays:
    """Return a dataset whose sample i is the same tree with row i of every leaf, as a tensor.

    Args:
        data: a tree (a dict, say) of tensors or numpy arrays, memory-mapped ones included, of one length.

    Raises:
        DataError: when a leaf is no array or has another length; says which.

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
    # Without the class memmap, whose rows take three times as long.
    data = tree.map(lambda leaf: leaf if isinstance(leaf, Tensor) else np.asarray(leaf), data)
    return Arrays(data, next(iter(lengths.values())))


def _rows(leaf: Any, places: npt.NDArray[np.int64]) -> Tensor:
    return leaf[torch.from_numpy(places)] if isinstance(leaf, Tensor) else torch.as_tensor(leaf[places])


def _sample(leaf: Any, index: int) -> Tensor:
    # A copy, for torch warns of memory that it may not write.
    return leaf[index] if isinstance(leaf, Tensor) else torch.as_tensor(np.array(leaf[index]))
