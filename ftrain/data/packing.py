"""Sequence packing: several documents in a row, none of which sees another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ftrain.errors import BatchError, DataError, require_positive

IGNORED = -100
"""The label that counts for nothing."""

NO_DOCUMENT = -1
"""The document of padding."""

Document: TypeAlias = "Sequence[int] | Tensor | Mapping[str, Any]"
"""Tokens, or a mapping with these and perhaps with labels."""


def pack(
    documents: Iterable[Document],
    length: int,
    *,
    rows: int | None = None,
    pad: int = 0,
    field: str = "tokens",
    cut: bool = False,
) -> dict[str, Tensor]:
    """Put documents one after another into rows of one length, a new row where the next does not fit.

    Documents keep their order, which is the caller's means to fill rows well: ``loader(..., pack=length)`` gives them
    in one in which little room is left. The label of a token is the next one of its document, and -100 for the last.

    Args:
        documents: tokens, or mappings; empty ones take no room.
        length: of a row.
        rows: how many rows there must be, the last of them empty if need be; as many as it takes, unless told.
        pad: the token in places that are left.
        field: what the tokens are called in a mapping. If it has ``"labels"`` too, these are taken as they are: each
            is that of the token in the same place.
        cut: cut a document that is longer than a row into several that do not see each other, else it is an error.

    Returns:
        ``tokens``, ``labels``, ``positions`` (from 0 in each document) and ``documents`` (counted from 0 in each row,
        -1 for padding), all int64 of shape (rows, length).

    Raises:
        OptionError: for a `length` or `rows` that is no positive number.
        DataError: when a document is no sequence of tokens or too long, or all need more than `rows`.

    >>> batch = pack([[5, 6, 7], [8, 9]], 6)
    >>> batch["tokens"].tolist(), batch["labels"].tolist(), batch["documents"].tolist()
    ([[5, 6, 7, 8, 9, 0]], [[6, 7, -100, 9, -100, -100]], [[0, 0, 0, 1, 1, -1]])
    """
    require_positive("pack", "length", length)
    if rows is not None:
        require_positive("pack", "rows", rows)
    placed, used = _placed(documents, length, field, cut)
    if rows is not None and used > rows:
        raise DataError(
            f"pack: the documents fill {used} rows of {length} tokens, and rows={rows}; give fewer at a time"
        )
    shape = (used if rows is None else rows, length)
    batch = {
        name: torch.full(shape, fill, dtype=torch.int64)
        for name, fill in (("tokens", pad), ("labels", IGNORED), ("positions", 0), ("documents", NO_DOCUMENT))
    }
    for piece in placed:
        place = piece.row, slice(piece.start, piece.start + len(piece.tokens))
        batch["tokens"][place] = piece.tokens
        batch["labels"][place] = piece.labels
        batch["positions"][place] = torch.arange(len(piece.tokens))
        batch["documents"][place] = piece.number
    return batch


@dataclass(frozen=True)
class Packed:
    """`pack` as a collate function."""

    draws: ClassVar[bool] = False

    length: int
    rows: int | None
    pad: int
    field: str
    cut: bool

    def __call__(self, documents: list[Any]) -> dict[str, Tensor]:
        """Return the documents of a batch, packed."""
        return pack(documents, self.length, rows=self.rows, pad=self.pad, field=self.field, cut=self.cut)


def packed(length: int, *, rows: int | None = None, pad: int = 0, field: str = "tokens", cut: bool = False) -> Packed:
    """Return `pack` with these options as a collate function.

    Raises:
        OptionError: for a `length` or `rows` that is no positive number.
    """
    require_positive("packed", "length", length)
    if rows is not None:
        require_positive("packed", "rows", rows)
    return Packed(length, rows, pad, field, cut)


def block_mask(documents: Tensor) -> Tensor:
    """Return who sees whom in packed rows: a token sees itself and those before it in its document.

    For ``scaled_dot_product_attention(..., attn_mask=)``, on the device of `documents`. Padding sees padding, for
    attention to nothing is NaN.

    Args:
        documents: (rows, length), what `pack` calls ``documents``.

    Returns:
        bool of shape (rows, 1, length, length), true where the query (third axis) sees the key (fourth).

    Raises:
        BatchError: for another shape.

    >>> block_mask(torch.tensor([[0, 0, 1]])).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    if documents.ndim != 2:
        raise BatchError(f"block_mask: documents have shape {tuple(documents.shape)}; needs (rows, length)")
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril().unsqueeze(1)


@dataclass(frozen=True)
class _Piece:
    row: int
    start: int
    number: int
    tokens: Tensor
    labels: Tensor


def _placed(documents: Iterable[Document], length: int, field: str, cut: bool) -> tuple[list[_Piece], int]:
    """Give every document its place, and count the rows."""
    placed: list[_Piece] = []
    row, start, number = -1, length, 0
    for tokens, labels in _pieces(documents, length, field, cut):
        if start + len(tokens) > length:
            row, start, number = row + 1, 0, 0
        placed.append(_Piece(row, start, number, tokens, labels))
        start, number = start + len(tokens), number + 1
    return placed, row + 1


def _pieces(documents: Iterable[Document], length: int, field: str, cut: bool) -> Iterator[tuple[Tensor, Tensor]]:
    for place, document in enumerate(documents):
        tokens, labels = _read(document, field, place)
        if len(tokens) > length and not cut:
            raise DataError(
                f"pack: document {place} of the batch has {len(tokens)} tokens, and a row {length}; pass cut=True, or "
                "make rows longer"
            )
        for start in range(0, len(tokens), length):
            yield tokens[start : start + length], labels[start : start + length]


def _read(document: Document, field: str, place: int) -> tuple[Tensor, Tensor]:
    if not isinstance(document, Mapping):
        return _shifted(_tokens(document, field, place))
    if field not in document:
        raise DataError(f"pack: document {place} of the batch has no {field!r}, but {', '.join(document)}; pass field=")
    tokens = _tokens(document[field], field, place)
    if "labels" not in document:
        return _shifted(tokens)
    labels = _tokens(document["labels"], "labels", place)
    if labels.shape != tokens.shape:
        raise DataError(f"pack: document {place} of the batch has {len(tokens)} {field} and {len(labels)} labels")
    return tokens, labels


def _shifted(tokens: Tensor) -> tuple[Tensor, Tensor]:
    labels = torch.full_like(tokens, IGNORED)
    labels[:-1] = tokens[1:]
    return tokens, labels


def _tokens(values: Any, name: str, place: int) -> Tensor:
    found = torch.as_tensor(values)
    if found.ndim != 1 or (found.numel() and (found.is_floating_point() or found.is_complex())):
        raise DataError(
            f"pack: {name} of document {place} of the batch have shape {tuple(found.shape)} and dtype {found.dtype}; "
            "needs whole numbers on one axis"
        )
    return found.long()
