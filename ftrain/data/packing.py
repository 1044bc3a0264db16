"""Sequence packing: several documents in each row, with attention only within a document."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain.errors import BatchError, DataError, require_positive, require_switches, whole_number

IGNORED = -100
"""The label that losses ignore."""

NO_DOCUMENT = -1
"""The document number of padding."""

Document: TypeAlias = "Sequence[int] | Tensor | Mapping[str, Any]"
"""Tokens, or a mapping with tokens and optionally ``"labels"``."""

_Tokens: TypeAlias = tuple[Tensor, Tensor]
"""The tokens and labels of a document, or of a part of it that fits in a row."""


def pack(
    documents: Iterable[Document],
    length: int,
    *,
    rows: int | None = None,
    pad: int = 0,
    field: str = "tokens",
    cut: bool = False,
) -> dict[str, Tensor]:
    """Return documents as rows of one length: one after another, and a new row when the next one does not fit.

    Documents keep their order; ``loader(..., pack=length)`` orders them so that little padding is left. The label of a
    token is the next token of its document, and -100 for the last one.

    Args:
        documents: tokens, or mappings with tokens; empty documents are left out.
        length: number of tokens in a row.
        rows: the number of rows; the last ones may be empty. Default: as many as needed.
        pad: the padding token.
        field: the key of the tokens in a mapping. Its ``"labels"``, if any, are used as they are, one for each token.
        cut: split a document that is longer than a row into several documents; else it is an error. The label of the
            last token of a part is the first token of the next part.

    Returns:
        ``tokens``, ``labels``, ``positions`` (from 0 in each document) and ``documents`` (counted from 0 in each row,
        -1 for padding), all int64 of shape (rows, length).

    Raises:
        OptionError: if `length` or `rows` is not a positive integer, or `pad` no integer.
        DataError: if a document is not a sequence of integers or is too long, or if more than `rows` are needed.

    >>> batch = pack([[5, 6, 7], [8, 9]], 6)
    >>> batch["tokens"].tolist(), batch["labels"].tolist(), batch["documents"].tolist()
    ([[5, 6, 7, 8, 9, 0]], [[6, 7, -100, 9, -100, -100]], [[0, 0, 0, 1, 1, -1]])
    """
    _require_options("pack", length, rows, pad, cut)
    filled: list[list[_Tokens]] = []
    free_space = 0
    for tokens, labels in _read_all(documents, length, field, cut):
        if len(tokens) > free_space:
            filled.append([])
            free_space = length
        filled[-1].append((tokens, labels))
        free_space -= len(tokens)
    if rows is not None and len(filled) > rows:
        raise DataError(
            f"pack: the documents fill {len(filled)} rows of {length} tokens, and rows={rows}; pass fewer documents "
            "or raise rows=. In a loader with pack=, lengths= are not those of the documents"
        )
    shape = (len(filled) if rows is None else rows, length)
    batch = {
        name: torch.full(shape, fill, dtype=torch.int64)
        for name, fill in (("tokens", pad), ("labels", IGNORED), ("positions", 0), ("documents", NO_DOCUMENT))
    }
    for row, row_documents in enumerate(filled):
        start = 0
        for number, (tokens, labels) in enumerate(row_documents):
            index = row, slice(start, start + len(tokens))
            batch["tokens"][index] = tokens
            batch["labels"][index] = labels
            batch["positions"][index] = torch.arange(len(tokens))
            batch["documents"][index] = number
            start += len(tokens)
    return batch


def packed(
    length: int, *, rows: int | None = None, pad: int = 0, field: str = "tokens", cut: bool = False
) -> functools.partial[dict[str, Tensor]]:
    """Return `pack` with these options as a collate function. Raises an OptionError if one is out of range."""
    _require_options("packed", length, rows, pad, cut)
    collate = functools.partial(pack, length=length, rows=rows, pad=pad, field=field, cut=cut)
    collate.draws = False  # type: ignore[attr-defined]
    return collate


def block_mask(documents: Tensor) -> Tensor:
    """Return the attention mask of packed rows: causal, and only within a document.

    Pass it to ``scaled_dot_product_attention(..., attn_mask=)``. To a model that adds its mask to the scores, as some
    of transformers do, pass ``torch.where(mask, 0.0, -torch.inf)``. Padding attends to padding, because attention
    without a key is NaN.

    Args:
        documents: the ``documents`` of `pack`, of shape (rows, length).

    Returns:
        bool of shape (rows, 1, length, length) on the device of `documents`, True where the query (third axis) attends
        to the key (fourth axis).

    Raises:
        BatchError: if `documents` has another shape.

    >>> block_mask(torch.tensor([[0, 0, 1]])).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    if documents.ndim != 2:
        raise BatchError(f"block_mask: documents have shape {tuple(documents.shape)}; needs (rows, length)")
    same_document = documents[:, :, None] == documents[:, None, :]
    return same_document.tril().unsqueeze(1)


def _require_options(function: str, length: int, rows: int | None, pad: int, cut: bool) -> None:
    require_switches(function, cut=cut)
    require_positive(function, "length", length)
    whole_number(function, "pad", pad, least=torch.iinfo(torch.int64).min)
    if rows is not None:
        require_positive(function, "rows", rows)


def _read_all(documents: Iterable[Document], length: int, field: str, cut: bool) -> Iterator[_Tokens]:
    """Yield the tokens and labels of documents, cut into parts of at most `length` tokens. Raises a DataError."""
    for index, document in enumerate(documents):
        tokens, labels = _read(document, field, index)
        if len(tokens) > length and not cut:
            raise DataError(
                f"pack: document {index} of the batch has {len(tokens)} tokens, and a row {length}; pass cut=True, or "
                "make rows longer"
            )
        for start in range(0, len(tokens), length):
            yield tokens[start : start + length], labels[start : start + length]


def _read(document: Document, field: str, index: int) -> _Tokens:
    """Return the tokens and labels of a document. Raises a DataError if it has none."""
    if not isinstance(document, Mapping):
        return _with_next_token_labels(_tokens(document, field, index))
    if field not in document:
        raise DataError(
            f"pack: document {index} of the batch has no {field!r}, but {', '.join(document)}; pass field=, "
            "to a loader as collate=ft.data.packed(length, rows=batch_size, field=)"
        )
    tokens = _tokens(document[field], field, index)
    if "labels" not in document:
        return _with_next_token_labels(tokens)
    labels = _tokens(document["labels"], "labels", index)
    if labels.shape != tokens.shape:
        raise DataError(f"pack: document {index} of the batch has {len(tokens)} {field} and {len(labels)} labels")
    return tokens, labels


def _with_next_token_labels(tokens: Tensor) -> _Tokens:
    labels = torch.full_like(tokens, IGNORED)
    labels[:-1] = tokens[1:]
    return tokens, labels


def _tokens(values: Any, name: str, index: int) -> Tensor:
    """Return integers as an int64 tensor of one axis. Raises a DataError if they are not integers on one axis."""
    try:
        tokens = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"pack: {name} of document {index} of the batch are a {type(values).__name__}; needs whole numbers on one "
            f"axis: {error}"
        ) from error
    if tokens.ndim != 1 or (tokens.numel() and (tokens.is_floating_point() or tokens.is_complex())):
        raise DataError(
            f"pack: {name} of document {index} of the batch have shape {tuple(tokens.shape)} and dtype {tokens.dtype}; "
            "needs whole numbers on one axis"
        )
    return tokens.long()
