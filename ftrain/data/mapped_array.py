"""Pickle arrays of memory-mapped files as the name of the file; numpy's pickle would copy the whole file.

Worker processes that are not forked receive the dataset as a pickle: on macOS, and since Python 3.14 on Linux.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def sendable(array: Any) -> Any:
    """Return an object to pickle in place of an array; it is unpickled as the same part of the same mapped file.

    Returns the array itself if it is not a contiguous part of a mapped file, or of a copy-on-write map, whose changes
    are not in the file.
    """
    # Views of a memory map may be memory maps too: follow the bases to the one that opened the file.
    file = array
    while isinstance(file, np.ndarray) and (not isinstance(file, np.memmap) or isinstance(file.base, np.ndarray)):
        file = file.base
    if not isinstance(file, np.memmap) or file.filename is None or file.mode == "c":
        return array
    if not array.size or not array.flags.c_contiguous:
        return array
    offset = file.offset + array.__array_interface__["data"][0] - file.__array_interface__["data"][0]
    return _MappedFile(str(file.filename), array.dtype, offset, array.shape)


class _MappedFile:
    """Pickles as the name of a file and a part of it, and unpickles as the array of this part."""

    def __init__(self, *part: Any) -> None:
        self._part = part

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, self._part


def _mapped(name: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    # A plain array: slices of a np.memmap take three times as long.
    return np.asarray(np.memmap(name, dtype=dtype, mode="r", offset=offset, shape=shape))
