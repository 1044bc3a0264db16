"""The lengths of samples, from a table or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ftrain.data.permutation import Indices
from ftrain.errors import DataError

Lengths: TypeAlias = Callable[[Indices], Indices]
"""``indices -> lengths``: the lengths of the samples with these indices."""


def lengths_function(lengths: Sequence[int] | Callable[[int], int], num_samples: int) -> Lengths:
    """Return `lengths` as a function of an array of indices.

    Args:
        lengths: the length of each sample, or a function ``index -> length``.
        num_samples: the number of samples.

    Raises:
        DataError: if `lengths` is not one integer of at least 0 for each sample. The returned function raises it too,
            if `lengths` is a function that returns something else.
    """
    if callable(lengths):
        return lambda indices: _call_for_each(lengths, indices)
    table = np.asarray(lengths)
    if table.shape != (num_samples,) or table.dtype.kind not in "iu" or (num_samples and table.min() < 0):
        raise DataError(
            f"loader: lengths have shape {table.shape} and dtype {table.dtype}; needs {num_samples} whole numbers of "
            "at least 0, one for each sample"
        )
    table = table.astype(np.int64, copy=False)
    return lambda indices: table[indices]


def _call_for_each(function: Callable[[int], int], indices: Indices) -> Indices:
    lengths = [function(int(index)) for index in indices]
    for index, length in zip(indices, lengths, strict=True):
        if not isinstance(length, int | np.integer) or length < 0:
            raise DataError(
                f"loader: lengths({index}) is {length!r}; needs a whole number of at least 0, the number of tokens of "
                "that sample"
            )
    return np.array(lengths, dtype=np.int64)
