"""Token files: ``.npy`` files of integers, written document by document and read through a memory map.

The ends of the documents are in a second file: ``text.npy`` and ``text.ends.npy``. A file is renamed to its final name
when it is complete, so that an interrupted writer leaves no partial file under that name. Each writer has temporary
names of its own: several processes that write the same file do not mix their documents, and the last one to end wins.
"""

from __future__ import annotations

import os
import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ftrain.data.mapped_array import sendable
from ftrain.errors import DataError, OptionError, as_path, require_positive

Tokens = npt.NDArray[np.integer[Any]]


class TokenWriter:
    """Writes a token file document by document; it needs 8 bytes of memory per document.

    Args:
        path: the file; its name ends in ``.npy``.
        dtype: the integer dtype of the tokens in the file; uint16 holds vocabularies of up to 65,536.

    Raises:
        OptionError: if the name does not end in ``.npy``, or the dtype is not an integer dtype.
        DataError: if the file cannot be written, here and in the methods.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "text.npy"
    ...     with TokenWriter(path) as writer:
    ...         writer.add([1, 2, 3, 4])
    ...         writer.add([5, 6])
    ...     TokenFile(path, 2)[1], TokenDocuments(path)[1]
    ({'tokens': tensor([3, 4]), 'labels': tensor([4, 5])}, {'tokens': tensor([5, 6])})
    """

    def __init__(self, path: str | Path, dtype: npt.DTypeLike = np.uint16) -> None:
        self._path = as_path("TokenWriter", "path", path)
        try:
            self._dtype = np.dtype(dtype)
        except TypeError as error:
            raise OptionError(f"TokenWriter: dtype is {dtype!r}; needs an integer dtype of numpy: {error}") from None
        if self._path.suffix != ".npy":
            raise OptionError(f"TokenWriter: path is {self._path}; needs a name that ends in .npy")
        if self._dtype.kind not in "iu":
            raise OptionError(f"TokenWriter: dtype is {self._dtype}; needs an integer dtype")
        self._ends = array("q")
        self._part = self._path.with_name(f".{self._path.stem}.{uuid.uuid4().hex}.part")
        with _named_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("wb")
            self._write_header(0)

    def add(self, tokens: Sequence[int] | Tensor | Tokens) -> None:
        """Append a document: integers of shape (length,) that fit the dtype. Raises a DataError if they are not."""
        document = np.asarray(tokens)
        limits = np.iinfo(self._dtype)
        if document.ndim != 1 or (document.size and document.dtype.kind not in "iu"):
            raise DataError(
                f"TokenWriter.add: the document has shape {document.shape} and dtype {document.dtype}; needs whole "
                "numbers on one axis"
            )
        if document.size and not limits.min <= document.min() <= document.max() <= limits.max:
            raise DataError(
                f"TokenWriter.add: tokens range from {document.min()} to {document.max()}, and {self._dtype} from "
                f"{limits.min} to {limits.max}; pass a wider dtype="
            )
        with _named_errors(self._path):
            self._file.write(document.astype(self._dtype).tobytes())
        self._ends.append((self._ends[-1] if self._ends else 0) + len(document))

    def close(self) -> None:
        """Complete the file, write it to disk and rename it to its final name; raises a DataError if that fails."""
        ends = self._part.with_suffix(".ends.part")
        with _named_errors(self._path):
            self._file.seek(0)
            self._write_header(self._ends[-1] if self._ends else 0)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            # The ends are renamed first, so that a token file always has them.
            with ends.open("wb") as file:
                np.save(file, np.array(self._ends, dtype=np.int64))
                file.flush()
                os.fsync(file.fileno())
            ends.replace(ends_path(self._path))
            self._part.replace(self._path)

    def _write_header(self, count: int) -> None:
        # numpy pads the header, so that the final count fits in the place of the first one, which is 0.
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            with suppress(OSError):  # Closing writes the rest of the buffer; on a full disk it fails again.
                self._file.close()
            for part in self._part, self._part.with_suffix(".ends.part"):
                part.unlink(missing_ok=True)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Context that raises a DataError that names the file in place of an error of the system."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"TokenWriter: {path} could not be written: {error}; make room, or choose another path. An earlier file of "
            "that name is unchanged"
        ) from error


def write_tokens(
    path: str | Path, documents: Iterable[Sequence[int] | Tensor | Tokens], dtype: npt.DTypeLike = np.uint16
) -> None:
    """Write documents, integers of shape (length,), to a token file; raises the errors of `TokenWriter`."""
    with TokenWriter(path, dtype) as writer:
        for tokens in documents:
            writer.add(tokens)


def ends_path(path: Path) -> Path:
    """Return the path of the file that holds the ends of the documents of a token file."""
    return path.with_suffix(".ends.npy")


class _TokenArray:
    """An array of tokens, or a file that each process memory-maps when it first reads it.

    Raises a DataError if the file cannot be read, or does not hold integers on one axis.
    """

    def __init__(self, source: str | Path | Tokens) -> None:
        if not isinstance(source, str | os.PathLike | np.ndarray):
            raise DataError(
                f"TokenFile: tokens are a {type(source).__name__}; needs a path, or an array: np.asarray(...)"
            )
        self._path = None if isinstance(source, np.ndarray) else as_path("TokenFile", "tokens", source)
        self._array: Tokens | None = np.asarray(source) if isinstance(source, np.ndarray) else None
        name = self._path or "the array"
        if self.array.ndim != 1 or self.array.dtype.kind not in "iu":
            raise DataError(
                f"TokenFile: {name} has shape {self.array.shape} and dtype {self.array.dtype}; needs whole numbers on "
                "one axis, as ft.data.write_tokens writes them"
            )

    @property
    def array(self) -> Tokens:
        """The array, of shape (tokens,)."""
        if self._array is None:
            try:
                # A plain array: slices of a np.memmap take three times as long.
                self._array = np.asarray(np.load(self._path or "", mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError, EOFError) as error:
                raise DataError(
                    f"TokenFile: {self._path} cannot be read: {error}. It must be a .npy file, as "
                    "ft.data.write_tokens makes them; of a file of numbers without a header, pass np.memmap(path, "
                    "dtype=np.uint16)"
                ) from error
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memory map, to send it to a worker, would copy the whole file.
        return {**self.__dict__, "_array": None if self._path else sendable(self._array)}


class TokenFile(Dataset[dict[str, Tensor]]):
    """A map-style dataset of consecutive windows of a token file; the last one is left out if it is not full.

    Sample i is ``{"tokens": ..., "labels": ...}``, both int64 of shape (length,); the label of a token is the next one.

    Args:
        tokens: the path of a ``.npy`` file that `write_tokens` made; or an array, such as ``np.memmap(path,
            dtype=np.uint16)`` of a file without a header.
        length: number of tokens in a window.

    Raises:
        OptionError: if `length` is not a positive integer.
        DataError: if the file cannot be read, or has too few tokens for one window.
    """

    draws = False

    def __init__(self, tokens: str | Path | Tokens, length: int) -> None:
        require_positive("TokenFile", "length", length)
        self._tokens, self._length = _TokenArray(tokens), length
        self._count = max(len(self._tokens.array) - 1, 0) // length
        if not self._count:
            raise DataError(
                f"TokenFile: {len(self._tokens.array)} tokens are too few for a window of length={length} and the "
                "label after it"
            )

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._count

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return several windows as one batch of shape (windows, length), as ``default_collate`` would."""
        array, size = self._tokens.array, self._length + 1
        windows = np.concatenate([array[i * self._length : i * self._length + size] for i in indices])
        tokens = _to_tensor(windows.reshape(-1, size))
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(self._count)[index] * self._length
        window = _to_tensor(self._tokens.array[start : start + self._length + 1])
        return {"tokens": window[:-1], "labels": window[1:]}


class TokenDocuments(Dataset[dict[str, Tensor]]):
    """A map-style dataset of the documents of a token file: sample i is ``{"tokens": tokens of document i}``, int64.

    Attributes:
        lengths: int64 array of the length of each document, for ``loader(documents, ..., lengths=documents.lengths)``.

    Args:
        path: a file that `write_tokens` made.

    Raises:
        DataError: if it or the file of the document ends cannot be read, or the two do not belong together.
    """

    draws = False

    def __init__(self, path: str | Path) -> None:
        self._tokens, self._ends = _TokenArray(path), _TokenArray(ends_path(as_path("TokenDocuments", "path", path)))
        ends = self._ends.array
        last = int(ends[-1]) if len(ends) else 0
        if last != len(self._tokens.array):
            raise DataError(
                f"TokenDocuments: {path} has {len(self._tokens.array)} tokens, and its documents end at {last}; write "
                "both again"
            )
        self.lengths = np.diff(ends, prepend=0).astype(np.int64)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._ends.array)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = range(len(self))[index]
        end = int(self._ends.array[row])
        return {"tokens": _to_tensor(self._tokens.array[end - int(self.lengths[row]) : end])}


def _to_tensor(tokens: Tokens) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))
