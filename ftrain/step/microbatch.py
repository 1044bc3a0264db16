"""Batches in pieces along their first axis."""

from __future__ import annotations

from typing import Any

from ftrain import tree
from ftrain.errors import OptionError
from ftrain.types import PyTree

ON_OOM = RAISE, SPLIT = "raise", "split"


def require_on_oom(function: str, on_oom: str) -> None:
    """Check what is to be done when memory runs out.

    Raises:
        OptionError: for anything but ``"raise"`` and ``"split"``.
    """
    if on_oom not in ON_OOM:
        raise OptionError(f"{function}: on_oom is {on_oom!r}; choices are {', '.join(ON_OOM)}")


def most_pieces(batch: PyTree) -> int:
    """In how many pieces a batch can be cut: its examples, or 1 when its tensors do not say how many there are."""
    lengths = {leaf.shape[0] for leaf in tree.leaves(batch) if _has_axis(leaf)}
    return max(1, *lengths) if len(lengths) == 1 else 1


def cut(batch: PyTree, pieces: int) -> list[PyTree]:
    """Cut every tensor of a batch along its first axis, without copying, into as many pieces as it allows.

    They differ by one example at most. 0-d tensors and other leaves go to every piece.

    >>> import torch
    >>> [len(piece) for piece in cut(torch.zeros(5, 2), 2)]
    [3, 2]
    """
    pieces = min(pieces, most_pieces(batch))
    if pieces == 1:
        return [batch]
    found, spec = tree.flatten(batch)
    columns = [leaf.tensor_split(pieces) if _has_axis(leaf) else (leaf,) * pieces for leaf in found]
    return [tree.unflatten(spec, [column[index] for column in columns]) for index in range(pieces)]


def _has_axis(leaf: Any) -> bool:
    return tree.is_tensor(leaf) and leaf.ndim > 0
