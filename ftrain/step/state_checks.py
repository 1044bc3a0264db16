"""Check that an argument is a state, and that its parameters are those that a step trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ftrain import tree
from ftrain.checkpoint.reading import LoadedCheckpoint
from ftrain.errors import StructureError
from ftrain.step.microbatch import OPEN_OBJECT, holds_tensor
from ftrain.tree.name_patterns import Mask, Select, as_select, require_matches
from ftrain.types import PyTree, TrainState


def require_state(function: str, state: Any) -> None:
    """Check that an argument is a state. Raises a StructureError that says what was found."""
    if not isinstance(state, TrainState):
        hint = ""
        if isinstance(state, LoadedCheckpoint):
            hint = ", which this checkpoint has in .parts['state']"
        elif isinstance(state, tuple):
            hint = "; a step and fit return a pair: state, metrics = step(state, batch)"
        raise StructureError(
            f"{function}: the state is {type(state).__name__}; needs the TrainState of step.init(){hint}"
        )


def mismatches(tensors: Mapping[str, Any], expected: Mapping[str, Tensor]) -> list[str]:
    """Return a message for each expected tensor that is missing in `tensors`, or has another shape there.

    `tensors` may have more names, because wrappers add some.
    """
    problems = []
    for name, tensor in expected.items():
        shape = list(getattr(tensors.get(name), "shape", ()))
        if name not in tensors:
            problems.append(f"{name}: missing")
        elif shape != list(tensor.shape):
            problems.append(f"{name}: found {shape}, needs {list(tensor.shape)}")
    return problems


def require_params(params: PyTree) -> None:
    """Check that there are parameters, all floating-point tensors. Raises a StructureError that names another leaf."""
    leaves = tree.leaves(params)
    if not leaves:
        raise StructureError("Step.init: there is no parameter to train; needs a tree with at least one tensor")
    for name, leaf in zip(tree.leaf_names(params), leaves, strict=True):
        if not isinstance(leaf, Tensor) and holds_tensor(leaf):
            raise StructureError(
                f"Step.init: {tree.path('params', name)} is {tree.describe(leaf)}, whose tensors are not found: "
                f"{OPEN_OBJECT}"
            )
        if not name and not isinstance(leaf, Tensor):
            raise StructureError(
                f"Step.init: params is {tree.describe(leaf)}; needs a tree of tensors, such as a dict by name: for the "
                "parameters of a module, ft.from_module(module, criterion) and step.init()"
            )
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.itemsize < 2:
            raise StructureError(
                f"Step.init: {tree.path('params', name)} is {tree.describe(leaf)}; needs a floating-point tensor of at "
                "least 16 bits (convert it, a complex one by torch.view_as_real and in the loss by "
                "torch.view_as_complex, freeze it with trainable=, or pass it as a buffer or in the batch)"
            )


def require_buffers(buffers: PyTree) -> None:
    """Check that buffers are tensors. Raises a StructureError that names another leaf."""
    for name, leaf in zip(tree.leaf_names(buffers), tree.leaves(buffers), strict=True):
        if not isinstance(leaf, Tensor):
            fix = OPEN_OBJECT if holds_tensor(leaf) else "make it one, such as torch.tensor(0) for a counter"
            raise StructureError(
                f"Step.init: {tree.path('buffers', name)} is {tree.describe(leaf)}; needs a tensor: {fix}"
            )


def select_trainable(trainable: Mask | None, names: set[str] | None, params: PyTree) -> Select:
    """Return ``(name, leaf) -> bool``, whether a parameter trains. Default: those in `names`, or all.

    Raises an OptionError if a pattern matches no parameter, or `trainable` is a string.
    """
    if trainable is None:
        return lambda name, leaf: names is None or name in names
    select = as_select("Step.init: trainable", trainable)
    require_matches(select, params)
    return select


def require_same_trainable(trainable: Mask | None, module: nn.Module | None, params: PyTree, frozen: PyTree) -> None:
    """Check that a state trains and freezes the parameters that a new state of the step would.

    Raises a StructureError that names the first one that differs, or an OptionError of `select_trainable`.
    """
    names = None
    if module is not None:
        names = {*tree.leaf_names(params), *tree.leaf_names(frozen)}
        names -= {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    select = select_trainable(trainable, names, tree.overlay(params, frozen))
    for part, trains in ((params, True), (frozen, False)):
        leaves = zip(tree.leaf_names(part), tree.leaves(part), strict=True)
        different = [name for name, leaf in leaves if bool(select(name, leaf)) is not trains]
        if different:
            state_does, step_does = ("trains", "freezes") if trains else ("freezes", "trains")
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise StructureError(
                f"Step: the state {state_does} {tree.path('params', different[0])}{more}, which this step {step_does}; "
                "make a new state with the values of this one: ft.to_module(module, state), then step.init()"
            )
