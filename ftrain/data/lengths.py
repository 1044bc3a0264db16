"""Lengths of samples, by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ftrain.data.batch_samplers import Lengths
from ftrain.data.permutation import Indices
from ftrain.errors import DataError


def lookup(lengths: Sequence[int] | Callable[[int], int], size: int) -> Lengths:
    """Return a function from indices to lengths.

    Raises:
        DataError: when there is not one whole number of at least 0 for each sample.
    """
    if callable(lengths):
        return lambda index: _asked(lengths, index)
    table = np.asarray(lengths)
    if table.shape != (size,) or table.dtype.kind not in "iu" or (size and table.min() < 0):
        raise DataError(
            f"loader: lengths have shape {table.shape} and dtype {table.dtype}; needs {size} whole numbers of at "
            "least 0, one for each sample"
        )
    table = table.astype(np.int64, copy=False)
    return lambda index: table[index]


def _asked(function: Callable[[int], int], index: Indices) -> Indices:
    found = [function(int(i)) for i in index]
    wrong = next((k for k, length in enumerate(found) if not isinstance(length, int | np.integer) or length < 0), None)
    if wrong is not None:
        raise DataError(
            f"loader: lengths({index[wrong]}) is {found[wrong]!r}; needs a whole number of at least 0: how many tokens "
            "that sample has"
        )
    return np.array(found, dtype=np.int64)
