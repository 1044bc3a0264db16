"""A dataset in memory: a tree of arrays with one row per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ftrain import tree
from ftrain.data.mapped_array import sendable
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": tree.map(sendable, self._data)}

    def rows(self, indices: Sequence[int]) -> PyTree:
        """Return several samples as one tree, stacked on a new first axis, as ``default_collate`` would."""
        array_index = np.asarray(indices, dtype=np.int64)
        tensor_index = torch.from_numpy(array_index)
        return tree.map(
            lambda leaf: leaf[tensor_index] if isinstance(leaf, Tensor) else _to_tensor(leaf[array_index]), self._data
        )

    def __getitem__(self, index: int) -> PyTree:
        # Allows negative indices, and raises the IndexError that ends `for sample in arrays(...)`.
        row = range(self._length)[index]
        # Rows of numpy are copied, because torch warns about read-only memory, such as that of a memory map.
        return tree.map(
            lambda leaf: leaf[row] if isinstance(leaf, Tensor) else _to_tensor(np.array(leaf[row])), self._data
        )


def _to_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Return a numpy array as a tensor; one from a file may have another byte order than this machine."""
    return torch.as_tensor(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))


def arrays(data: PyTree) -> ArrayDataset:
    """Return a dataset whose sample i is the tree `data` with row i of every leaf, as a tensor.

    Args:
        data: a tree (a dict, say) of tensors or numpy arrays, memory-mapped ones included, all of one length.

    Raises:
        DataError: if a leaf is not an array, has no axis or another length, or a dtype that torch does not have; the
            message names it.

    >>> arrays({"x": torch.arange(6).view(3, 2), "y": np.array([5, 6, 7])})[1]
    {'x': tensor([2, 3]), 'y': tensor(6)}
    """
    lengths: dict[str, int] = {}
    for name, leaf in zip(tree.leaf_names(data), tree.leaves(data), strict=True):
        if not isinstance(leaf, Tensor | np.ndarray) or not leaf.ndim:
            raise DataError(f"arrays: {tree.path('data', name)} is {tree.describe(leaf)}; needs arrays with an axis")
        if isinstance(leaf, np.ndarray):
            try:
                _to_tensor(np.empty(0, leaf.dtype))
            except TypeError as error:
                raise DataError(f"arrays: {tree.path('data', name)} is {tree.describe(leaf)}: {error}") from error
        lengths[name] = len(leaf)
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{tree.path('data', name)}: {length}" for name, length in lengths.items())
        raise DataError(f"arrays: needs arrays of one length, one row for each sample; found {listed or 'none'}")
    # A plain array: the rows of a np.memmap take three times as long.
    data = tree.map(lambda leaf: leaf if isinstance(leaf, Tensor) else np.asarray(leaf), data)
    return ArrayDataset(data, next(iter(lengths.values())))
