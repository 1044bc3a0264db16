"""Choose the parameters that train, and check that they can."""

from __future__ import annotations

from torch import Tensor, nn

from ftrain import tree
from ftrain.errors import StructureError
from ftrain.step.purity import merge
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


def require_choice(trainable: Mask | None, module: nn.Module | None, params: PyTree, frozen: PyTree) -> None:
    """Check that a state trains the parameters that a new one of this step would, and freezes the others.

    Args:
        trainable: what the step was told.
        module: of its loss, or None.
        params: what the state trains.
        frozen: what it does not.

    Raises:
        StructureError: naming the first parameter of which it is not so.
        OptionError: for a pattern that matches no parameter.
    """
    names = None
    if module is not None:
        names = {*tree.leaf_names(params), *tree.leaf_names(frozen)}
        names -= {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    select = chooser(trainable, names, merge(params, frozen))
    for kind, trains in ((params, True), (frozen, False)):
        leaves = zip(tree.leaf_names(kind), tree.leaves(kind), strict=True)
        other = [name for name, leaf in leaves if bool(select(name, leaf)) is not trains]
        if other:
            state_does, step_does = ("trains", "freezes") if trains else ("freezes", "trains")
            more = f" and {len(other) - 1} more" if len(other) > 1 else ""
            raise StructureError(
                f"Step: the state {state_does} {tree.path('params', other[0])}{more}, which this step {step_does}; "
                "make another one by step.init(), with the values of this one (first ft.to_module(module, state))"
            )


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
