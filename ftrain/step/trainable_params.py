"""Choose the parameters that train, and check that they can."""

from __future__ import annotations

from torch import Tensor

from ftrain import tree
from ftrain.errors import StructureError
from ftrain.tree.name_patterns import Mask, Select, as_select, require_matches
from ftrain.types import PyTree


def chooser(trainable: Mask | None, names: set[str] | None, params: PyTree) -> Select:
    """Return ``(name, leaf) -> bool``, whether a parameter trains. Default: those in `names`, or all.

    Raises:
        OptionError: for a pattern that matches no parameter, or a bare string.
    """
    if trainable is None:
        return lambda name, leaf: names is None or name in names
    select = as_select("Step.init: trainable", trainable)
    require_matches(select, params)
    return select


def require_params(params: PyTree) -> None:
    """Check that there are parameters, and that all are floating-point tensors.

    Raises:
        StructureError: naming the first leaf that is not.
    """
    leaves = tree.leaves(params)
    if not leaves:
        raise StructureError("Step.init: there is no parameter to train; needs a tree with at least one tensor")
    for name, leaf in zip(tree.leaf_names(params), leaves, strict=True):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            raise StructureError(
                f"Step.init: {tree.path('params', name)} is {tree.describe(leaf)}; needs a floating-point tensor "
                "(convert it, freeze it with trainable=, or pass it as a buffer or in the batch)"
            )
