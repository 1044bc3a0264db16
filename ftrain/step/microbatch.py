"""Split a batch into pieces along its first axis, and compare the loss of a batch with that of its pieces."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ftrain import tree
from ftrain.errors import BatchError, OptionError
from ftrain.types import Loss, Mean, PyTree

ON_OOM = RAISE, SPLIT = "raise", "split"

TOLERANCE, NARROW_TOLERANCE = 1e-3, 2e-2
"""Relative difference up to which two losses count as equal: in 32 bits or more, and with parameters or matrix products
in 16 bits."""


def require_on_oom(function: str, on_oom: str) -> None:
    """Check the option for running out of memory.

    Raises:
        OptionError: when it is not ``"raise"`` or ``"split"``.
    """
    if on_oom not in ON_OOM:
        raise OptionError(f"{function}: on_oom is {on_oom!r}; choices are {', '.join(ON_OOM)}")


def most_pieces(batch: PyTree) -> int:
    """Return the number of examples in a batch, or 1 if its tensors have different first axes and cannot be split."""
    lengths = {leaf.shape[0] for leaf in tree.leaves(batch) if _has_axis(leaf)}
    return max(1, *lengths) if len(lengths) == 1 else 1


def split_batch(batch: PyTree, pieces: int, *, require_equal: str | None = None) -> list[PyTree]:
    """Split every tensor of a batch along its first axis, without copying.

    0-d tensors and other leaves go to every piece.

    Args:
        batch: a tree of tensors whose first axes have the same length.
        pieces: the number of pieces, at most the number of examples. Their lengths differ by at most one.
        require_equal: the name of the calling function, if the pieces must have equal lengths; else None.

    Raises:
        BatchError: with `require_equal`, naming the leaf whose first axis `pieces` does not divide, or whose length
            differs from that of the others.

    >>> import torch
    >>> [len(piece) for piece in split_batch(torch.zeros(5, 2), 2)]
    [3, 2]
    """
    leaves, spec = tree.flatten(batch)
    if require_equal is None:
        pieces = min(pieces, most_pieces(batch))
        if pieces == 1:
            return [batch]
        columns = [leaf.tensor_split(pieces) if _has_axis(leaf) else (leaf,) * pieces for leaf in leaves]
    else:
        _require_divisible(batch, leaves, pieces, require_equal)
        columns = [leaf.chunk(pieces) if _has_axis(leaf) else (leaf,) * pieces for leaf in leaves]
    return [tree.unflatten(spec, [column[index] for column in columns]) for index in range(pieces)]


def _has_axis(leaf: Any) -> bool:
    return tree.is_tensor(leaf) and leaf.ndim > 0


def _require_divisible(batch: PyTree, leaves: Sequence[Any], pieces: int, function: str) -> None:
    lengths = {index: leaf.shape[0] for index, leaf in enumerate(leaves) if _has_axis(leaf)}
    if not lengths:
        raise BatchError(f"{function}: the batch has no tensor with an axis to split; found {tree.signature(batch)}")
    first = next(iter(lengths))
    for index, length in lengths.items():
        if length == lengths[first] and length % pieces == 0 and length > 0:
            continue
        names = [tree.path("batch", name) for name in tree.leaf_names(batch)]
        if length != lengths[first]:
            raise BatchError(
                f"{function}: {names[index]} has {length} examples and {names[first]} has {lengths[first]}; all first "
                "axes must have the same length"
            )
        raise BatchError(
            f"{function}: the first axis of {names[index]} has length {length}, which is not a positive multiple of "
            f"{pieces}; change the batch size or n, or drop the last short batch"
        )


def combined(losses: Sequence[Mean]) -> float:
    """Return the loss of all pieces together; waits for the device."""
    return float(functools.reduce(operator.add, losses))


def is_combined(loss: Loss, params: PyTree, whole: Mean, pieces: Sequence[Mean]) -> bool:
    """Return whether the loss of a batch equals that of its pieces together; waits for the device.

    Args:
        loss: the function that returned these losses.
        params: the parameters of the loss.
        whole: the loss of the batch. If it is not finite, it counts as equal.
        pieces: the losses of its pieces.
    """
    together = functools.reduce(operator.add, pieces)
    value, of_pieces, *each = torch.stack([mean.value.detach() for mean in (whole, together, *pieces)]).tolist()
    is_narrow = loss.narrow or any(leaf.itemsize < 4 for leaf in tree.leaves(params))
    limit = (NARROW_TOLERANCE if is_narrow else TOLERANCE) * max(map(abs, (value, *each)))
    # A piece with a loss of NaN, such as a mean over no tokens, makes the losses differ.
    return not math.isfinite(value) or abs(value - of_pieces) <= limit
