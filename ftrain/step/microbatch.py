"""Split a batch into pieces along its first axis, and compare the loss of a batch with that of its pieces."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import optree
import torch

from ftrain import tree
from ftrain._context import setting
from ftrain.errors import BatchError
from ftrain.types import NAMESPACE, Loss, Mean, PyTree

ExampleLists: TypeAlias = frozenset[optree.PyTreeAccessor]
"""Where lists and tuples with a value for each example are in a batch."""

OPEN_OBJECT = (
    "pass its tensors in a dict, make its class with @optree.dataclasses.dataclass(namespace='ftrain'), or register it "
    "with optree.register_pytree_node(..., namespace='ftrain')"
)
"""What to do about an object in a batch whose tensors are not found."""

ON_OOM = RAISE, SPLIT = "raise", "split"

TOLERANCE, NARROW_TOLERANCE = 1e-3, 2e-2
"""Relative difference up to which two losses count as equal: in 32 bits or more, and with parameters or matrix products
in 16 bits."""


_fewest: ContextVar[int | None] = ContextVar("ftrain_fewest_examples", default=None)


with_fewest_examples = functools.partial(setting, _fewest)
"""``fewest -> context`` in which all ranks split their rows into the same number of pieces, of at least one example
each. `fewest` is the smallest number of examples on any rank; None if this rank need not follow the others."""


_first_example: ContextVar[int] = ContextVar("ftrain_first_example", default=0)


first_example = _first_example.get
"""``() -> int``: the number, in the whole batch, of the first example of the current piece."""


@contextmanager
def within_piece(pieces: int, first: int) -> Iterator[None]:
    """Context of the computation on one of `pieces` pieces, whose first example is number `first` of the split batch.

    Pieces may be split again, so contexts may be nested.
    """
    fewest = _fewest.get()
    of_piece = with_fewest_examples(None if fewest is None else fewest // pieces)
    with of_piece, setting(_first_example, _first_example.get() + first):
        yield


def pieces_of_fewest(pieces: int, fewest: int) -> int:
    """Return the number of pieces into which ranks split their batches, if the smallest batch has `fewest` examples."""
    return max(1, min(pieces, fewest))


def take_examples(batch: PyTree, examples: slice) -> PyTree:
    """Return some examples of a batch. Leaves that `split_batch` does not split are returned as they are."""
    leaves, spec = _flatten_examples(batch)
    of_examples = [leaf[examples] if _has_axis(leaf) or isinstance(leaf, list | tuple) else leaf for leaf in leaves]
    return tree.unflatten(spec, of_examples)


def repeat_examples(batch: PyTree, times: int) -> PyTree:
    """Return a batch repeated `times` times. Leaves that `split_batch` does not split are returned as they are."""
    leaves, spec = _flatten_examples(batch)
    return tree.unflatten(spec, [_repeated(leaf, times) for leaf in leaves])


def _repeated(leaf: Any, times: int) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.cat([leaf] * times) if leaf.ndim else leaf
    if isinstance(leaf, np.ndarray):
        return np.concatenate([leaf] * times) if leaf.ndim else leaf
    return leaf * times if isinstance(leaf, list | tuple) else leaf


def most_pieces(batch: PyTree) -> int:
    """Return the number of examples in a batch, or 1 if its tensors have different first axes and cannot be split."""
    leaves = tree.leaves(batch)
    lengths = lengths_of(leaves)
    return max(1, *lengths) if len(lengths) == 1 and not any(map(_is_sparse_or_nested, leaves)) else 1


def split_batch(batch: PyTree, pieces: int, *, require_examples: str | None = None) -> list[PyTree]:
    """Split every tensor and array of a batch along its first axis, without copying.

    A list or tuple with a value for each example is split, too: one that holds no tensor or array with an axis, and is
    as long as the batch, such as lengths, texts or names. 0-d tensors and other leaves go to every piece.

    Args:
        batch: a tree of tensors and NumPy arrays whose first axes have the same length.
        pieces: the number of pieces, at most the number of examples. Their lengths differ by at most one.
        require_examples: the name of the calling function, to call `require_rows` for it first, which raises errors.

    >>> import torch
    >>> [len(piece) for piece in split_batch(torch.zeros(5, 2), 2)]
    [3, 2]
    """
    if require_examples is not None:
        require_rows(batch, require_examples)
    fewest = _fewest.get()
    pieces = min(pieces, most_pieces(batch)) if fewest is None else pieces_of_fewest(pieces, fewest)
    if pieces == 1:
        return [batch]
    columns, spec = split_leaves(batch, pieces)
    return [tree.unflatten(spec, [column[index] for column in columns]) for index in range(pieces)]


def split_leaves(batch: PyTree, pieces: int) -> tuple[list[Sequence[Any]], optree.PyTreeSpec]:
    """Return the pieces of each leaf, and the structure of a piece; a list or tuple that is split is one leaf."""
    leaves, spec = _flatten_examples(batch)
    return [_cut(leaf, pieces) for leaf in leaves], spec


def _flatten_examples(batch: PyTree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a batch and its structure; a list or tuple with a value for each example is one leaf."""
    lists = example_lists(batch)
    if not lists:
        return tree.flatten(batch)
    nodes = {id(accessor(batch)) for accessor in lists}
    return tree.flatten(batch, lambda node: id(node) in nodes)


_example_lists: ContextVar[ExampleLists | None] = ContextVar("ftrain_example_lists", default=None)


def example_lists(batch: PyTree) -> ExampleLists:
    """Return where the lists and tuples with a value for each example are in a batch.

    They have the length of the batch. In the context `with_example_lists`, `batch` is a piece, and those of the whole
    batch are returned.
    """
    known = _example_lists.get()
    if known is not None:
        return known
    leaves = tree.leaves(batch)
    lengths = lengths_of(leaves)
    if len(lengths) != 1 or all(map(tree.is_tensor, leaves)):
        return frozenset()
    (length,) = lengths

    def has_one_for_each(node: Any) -> bool:
        return type(node) in (list, tuple) and len(node) == length and not any(map(_has_axis, tree.leaves(node)))

    accessors, nodes, _ = optree.tree_flatten_with_accessor(batch, has_one_for_each, namespace=NAMESPACE)
    return frozenset(each for each, node in zip(accessors, nodes, strict=True) if isinstance(node, list | tuple))


with_example_lists = functools.partial(setting, _example_lists)
"""``lists -> context`` of the computation on pieces of a batch, in which `example_lists` returns `lists`."""


def _cut(leaf: Any, pieces: int) -> Sequence[Any]:
    """Return the pieces of a leaf. If they cannot be equally long, the first ones are longer by one."""
    if not _has_axis(leaf) and not isinstance(leaf, list | tuple):
        return (leaf,) * pieces
    length, longer = divmod(len(leaf), pieces)
    ends = [piece * length + min(piece, longer) for piece in range(pieces + 1)]
    return [leaf[start:end] for start, end in pairwise(ends)]


def _has_axis(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def holds_tensor(leaf: Any, depth: int = 4) -> bool:
    """Whether an object has a tensor in its attributes, or in their values."""
    if isinstance(leaf, torch.Tensor):
        return True
    if depth == 0 or isinstance(leaf, str | bytes | int | float | complex | type | None) or callable(leaf):
        return False
    if isinstance(leaf, Mapping):
        return any(holds_tensor(value, depth - 1) for value in leaf.values())
    if isinstance(leaf, list | tuple | set | frozenset):
        return any(holds_tensor(value, depth - 1) for value in leaf)
    return any(holds_tensor(value, depth - 1) for value in getattr(leaf, "__dict__", {}).values())


def _is_sparse_or_nested(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout != torch.strided)


def lengths_of(leaves: Sequence[Any]) -> set[int]:
    """Return the lengths of the first axes of tensors and NumPy arrays."""
    return {leaf.shape[0] for leaf in leaves if _has_axis(leaf)}


def require_rows(batch: PyTree, function: str) -> None:
    """Check that a batch has a row for each example in every tensor and array with an axis.

    Raises a BatchError that names the leaf, also for an object with tensors, which every piece would get whole.
    """
    leaves = tree.leaves(batch)
    objects = [] if all(map(tree.is_tensor, leaves)) else _flatten_examples(batch)[0]
    for leaf in objects:
        if not isinstance(leaf, list | tuple | torch.Tensor) and holds_tensor(leaf):
            raise BatchError(
                f"{function}: the batch holds a {type(leaf).__name__} with tensors in it, which cannot be split; "
                f"{OPEN_OBJECT}"
            )
    for index, leaf in enumerate(leaves):
        if _is_sparse_or_nested(leaf):
            raise BatchError(
                f"{function}: {tree.path('batch', tree.leaf_names(batch)[index])} is {tree.describe(leaf)}, which "
                "cannot be split along its first axis; put dense tensors with a row for each example into the batch, "
                "and make it in the loss"
            )
    lengths = {index: leaf.shape[0] for index, leaf in enumerate(leaves) if _has_axis(leaf)}
    if not lengths:
        raise BatchError(f"{function}: the batch has no tensor with an axis to split; found {tree.signature(batch)}")
    first = next(iter(lengths))
    for index, length in lengths.items():
        if length != lengths[first]:
            names = [tree.path("batch", name) for name in tree.leaf_names(batch)]
            raise BatchError(
                f"{function}: {names[index]} has {length} examples and {names[first]} has {lengths[first]}; all first "
                "axes must have the same length"
            )
    if lengths[first] == 0:
        raise BatchError(f"{function}: the batch has no examples; found {tree.signature(batch)}")


def difference(loss: Loss, params: PyTree, whole: Mean, pieces: Sequence[Mean]) -> tuple[float, float] | None:
    """Return the loss of a batch and the pooled loss of its pieces; None if they are equal; waits for the device.

    They count as equal if the loss of the batch is not finite.
    """
    pooled = functools.reduce(Mean.pooled, pieces)
    # One copy to the host for all values.
    value, pooled_value, *piece_values = torch.stack([m.value.detach() for m in (whole, pooled, *pieces)]).tolist()
    is_narrow = loss.narrow or any(leaf.itemsize < 4 for leaf in tree.leaves(params))
    limit = (NARROW_TOLERANCE if is_narrow else TOLERANCE) * max(map(abs, (value, *piece_values)))
    # The difference may be NaN, if a piece is a mean over no tokens, say: then the losses are not equal either.
    is_equal = abs(value - pooled_value) <= limit
    return (value, pooled_value) if math.isfinite(value) and not is_equal else None
