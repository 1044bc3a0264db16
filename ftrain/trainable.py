"""Which leaves of a tree of parameters train, and whether they can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import Tensor

from ftrain import tree
from ftrain.errors import OptionError, StructureError
from ftrain.types import PyTree

Trainable: TypeAlias = Callable[[str, Tensor], bool] | Sequence[str]
"""Which parameters train: ``(name, leaf) -> bool``, or patterns of names such as ``["head.*"]``."""


def chooser(trainable: Trainable | None, names: set[str] | None, params: PyTree) -> Callable[[str, Tensor], bool]:
    """Return ``(name, leaf) -> bool`` for a choice of parameters; without one, that of `names`, or all.

    Raises:
        OptionError: for a pattern that matches no parameter, or a bare string.
    """
    if trainable is None:
        return lambda name, leaf: names is None or name in names
    if callable(trainable):
        return trainable
    if isinstance(trainable, str):
        raise OptionError(f"Step.init: trainable is {trainable!r}, needs a list of patterns: [{trainable!r}]")
    patterns = list(trainable)
    known = tree.leaf_names(params)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise OptionError(
                f"Step.init: trainable names {pattern!r}, and no parameter matches; there are {_some(known)}"
            )
    return lambda name, leaf: any(fnmatchcase(name, pattern) for pattern in patterns)


def require_params(params: PyTree) -> None:
    """Check that there are parameters, and that all are floating-point tensors.

    Raises:
        StructureError: naming the first leaf that is not.
    """
    found = tree.leaves(params)
    if not found:
        raise StructureError("Step.init: there is no parameter to train; needs a tree with at least one tensor")
    for name, leaf in zip(tree.leaf_names(params), found, strict=True):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            raise StructureError(
                f"Step.init: {tree.path('params', name)} is {tree.describe(leaf)}; needs a floating-point tensor "
                "(convert it, freeze it with trainable=, or pass it as a buffer or in the batch)"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[: tree.MAX_LISTED]) + ", ..." * (len(names) > tree.MAX_LISTED)
