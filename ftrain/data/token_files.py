"""Token files: plain ``.npy`` files of whole numbers, written in a stream and read without loading them.

The ends of the documents stand in a second file beside the first: ``text.npy`` and ``text.ends.npy``. A file gets its
name when it is complete, so that a writer that died leaves nothing that looks like one.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ftrain.errors import DataError, OptionError, require_positive

Tokens = npt.NDArray[np.integer[Any]]


class TokenWriter:
    """Writes a token file document by document, in constant memory but for 8 bytes a document.

    Args:
        path: of the file; its name ends in ``.npy``.
        dtype: of the tokens in the file; uint16 holds vocabularies of up to 65,536.

    Raises:
        OptionError: for another name, or a dtype that is none of whole numbers.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "text.npy"
    >>> with TokenWriter(path) as writer:
    ...     writer.add([1, 2, 3, 4])
    ...     writer.add([5, 6])
    >>> TokenFile(path, 2)[1], TokenDocuments(path)[1]
    ({'tokens': tensor([3, 4]), 'labels': tensor([4, 5])}, {'tokens': tensor([5, 6])})
    """

    def __init__(self, path: str | Path, dtype: npt.DTypeLike = np.uint16) -> None:
        self._path, self._dtype = Path(path), np.dtype(dtype)
        if self._path.suffix != ".npy":
            raise OptionError(f"TokenWriter: path is {self._path}; needs a name that ends in .npy")
        if self._dtype.kind not in "iu":
            raise OptionError(f"TokenWriter: dtype is {self._dtype}; needs one of whole numbers")
        self._ends = array("q")
        self._part = self._path.with_suffix(".part")
        self._file = self._part.open("wb")
        self._write_header(0)

    def add(self, tokens: Sequence[int] | Tensor | Tokens) -> None:
        """Append a document.

        Raises:
            DataError: when it is no row of whole numbers, or one does not fit the dtype.
        """
        found = np.asarray(tokens)
        limits = np.iinfo(self._dtype)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise DataError(
                f"TokenWriter.add: the document has shape {found.shape} and dtype {found.dtype}; needs whole numbers "
                "on one axis"
            )
        if found.size and not limits.min <= found.min() <= found.max() <= limits.max:
            raise DataError(
                f"TokenWriter.add: tokens go from {found.min()} to {found.max()}, and {self._dtype} from {limits.min} "
                f"to {limits.max}; pass a wider dtype="
            )
        self._file.write(found.astype(self._dtype).tobytes())
        self._ends.append((self._ends[-1] if self._ends else 0) + len(found))

    def close(self) -> None:
        """Complete the file and give it its name."""
        self._file.seek(0)
        self._write_header(self._ends[-1] if self._ends else 0)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        # The ends first: a file of tokens is never without them.
        ends = self._part.with_suffix(".ends.part")
        with ends.open("wb") as file:
            np.save(file, np.array(self._ends, dtype=np.int64))
        ends.replace(ends_path(self._path))
        self._part.replace(self._path)

    def _write_header(self, count: int) -> None:
        # numpy leaves room for a count that grows, so that the header can be written again in its place.
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self._file.close()
        self._part.unlink()


def write_tokens(
    path: str | Path, documents: Iterable[Sequence[int] | Tensor | Tokens], dtype: npt.DTypeLike = np.uint16
) -> None:
    """Write documents to a token file.

    Args:
        path: of the file; its name ends in ``.npy``.
        documents: rows of tokens.
        dtype: of the tokens in the file.

    Raises:
        OptionError: for another name, or a dtype that is none of whole numbers.
        DataError: when a document is no row of whole numbers, or a token does not fit the dtype.
    """
    with TokenWriter(path, dtype) as writer:
        for tokens in documents:
            writer.add(tokens)


def ends_path(path: Path) -> Path:
    """Return where the ends of the documents of a token file stand."""
    return path.with_suffix(".ends.npy")


class Mapped:
    """An array that is mapped into memory when it is first read, in each process anew.

    Raises:
        DataError: when there is no row of whole numbers in the file.
    """

    def __init__(self, source: str | Path | Tokens) -> None:
        self._path = None if isinstance(source, np.ndarray) else Path(source)
        self._array: Tokens | None = np.asarray(source) if isinstance(source, np.ndarray) else None
        name = self._path or "the array"
        if self.array.ndim != 1 or self.array.dtype.kind not in "iu":
            raise DataError(
                f"TokenFile: {name} has shape {self.array.shape} and dtype {self.array.dtype}; needs whole numbers on "
                "one axis, as ft.data.write_tokens writes them"
            )

    @property
    def array(self) -> Tokens:
        """The array.

        Raises:
            DataError: when the file is missing, cut off, or no array.
        """
        if self._array is None:
            try:
                # Without the class memmap, whose slices take three times as long.
                self._array = np.asarray(np.load(self._path or "", mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError) as error:
                raise DataError(f"TokenFile: {self._path} cannot be read: {error}") from error
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        # Sent to a worker, a mapped array would be copied whole.
        return {**self.__dict__, "_array": None if self._path else self._array}


class TokenFile(Dataset[dict[str, Tensor]]):
    """Windows of a token file: sample i is ``length`` tokens and, as labels, the token that follows each.

    Windows touch and do not overlap; the last tokens, too few for a window, are left out.

    Args:
        tokens: the path of a ``.npy`` file, as `write_tokens` makes it; or an array, such as ``np.memmap(path,
            dtype=np.uint16)`` of a file of nothing but tokens.
        length: of a window.

    Raises:
        OptionError: for a `length` that is no positive number.
        DataError: when the file cannot be read, or does not hold enough tokens.
    """

    draws = False

    def __init__(self, tokens: str | Path | Tokens, length: int) -> None:
        require_positive("TokenFile", "length", length)
        self._mapped, self._length = Mapped(tokens), length
        self._count = max(len(self._mapped.array) - 1, 0) // length
        if not self._count:
            raise DataError(
                f"TokenFile: {len(self._mapped.array)} tokens are too few for a window of length={length} and the "
                "label after it"
            )

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._count

    def rows(self, index: Sequence[int]) -> dict[str, Tensor]:
        """Return several windows as one batch: what collating them would give."""
        array, size = self._mapped.array, self._length + 1
        windows = np.concatenate([array[i * self._length : i * self._length + size] for i in index]).reshape(-1, size)
        tokens = _tensor(windows)
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(self._count)[index] * self._length
        window = _tensor(self._mapped.array[start : start + self._length + 1])
        return {"tokens": window[:-1], "labels": window[1:]}


class TokenDocuments(Dataset[dict[str, Tensor]]):
    """The documents of a token file: sample i is ``{"tokens": those of document i}``.

    `lengths` has the length of each, for ``loader(documents, ..., lengths=documents.lengths)``.

    Args:
        path: of a file that `write_tokens` made.

    Raises:
        DataError: when it, or the file of the ends beside it, cannot be read, or the two do not fit.
    """

    draws = False

    def __init__(self, path: str | Path) -> None:
        self._mapped, self._ends = Mapped(path), Mapped(ends_path(Path(path)))
        ends = self._ends.array
        last = int(ends[-1]) if len(ends) else 0
        if last != len(self._mapped.array):
            raise DataError(
                f"TokenDocuments: {path} has {len(self._mapped.array)} tokens, and its documents end at {last}; write "
                "both again"
            )
        self.lengths = np.diff(ends, prepend=0).astype(np.int64)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._ends.array)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = range(len(self))[index]
        end = int(self._ends.array[place])
        return {"tokens": _tensor(self._mapped.array[end - int(self.lengths[place]) : end])}


def _tensor(tokens: Tokens) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))
