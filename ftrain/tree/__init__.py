"""Pytrees of tensors: structure, names of leaves, arithmetic and comparison."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ftrain import _torch
from ftrain.errors import MAX_LISTED, StructureError, first_lines
from ftrain.tree import element_slices, sharding
from ftrain.tree.element_slices import PART, in_parts
from ftrain.tree.element_slices import slices as slices
from ftrain.tree.real_elements import COMPLEX, DENSE, real_elements
from ftrain.types import NAMESPACE, PyTree

__all__ = [
    "HOST",
    "MAX_LISTED",
    "add",
    "all_finite",
    "batch_length",
    "cast",
    "clone",
    "describe",
    "device_of",
    "flatten",
    "global_norm",
    "is_blank",
    "is_tensor",
    "leaf_names",
    "leaves",
    "map",
    "map_named",
    "norm_of",
    "overlay",
    "path",
    "require_same",
    "scale",
    "scale_leaves",
    "scale_leaves_",
    "signature",
    "split",
    "take",
    "to",
    "unflatten",
    "where",
]

HOST = torch.device("cpu")


def as_tree(batch: Any) -> PyTree:
    """Return a batch as a tree: a mapping that is not a dict (a `BatchEncoding` of transformers, say) becomes one."""
    return dict(batch) if not isinstance(batch, dict) and isinstance(batch, Mapping) else batch


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of `tree` in a fixed order, and its structure.

    Nodes for which `is_leaf` returns True count as leaves.
    """
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> PyTree:
    """Put `leaves` back into the structure that `flatten` returned."""
    return optree.tree_unflatten(spec, leaves)


def leaves(tree: PyTree) -> list[Any]:
    """Return the leaves of `tree` in the order of `flatten`."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def map(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:  # noqa: A001
    """Apply `function` leaf by leaf over trees of equal structure.

    >>> map(lambda a, b: a + b, {"x": 1, "y": (2, 3)}, {"x": 10, "y": (20, 30)})
    {'x': 11, 'y': (22, 33)}
    """
    return optree.tree_map(function, tree, *rest, namespace=NAMESPACE)


def leaf_names(tree: PyTree) -> list[str]:
    """Return the path of every leaf as a dotted name, in the order of `flatten`.

    >>> leaf_names({"w": 1, "blocks": [2, {"b": 3}]})
    ['blocks.0', 'blocks.1.b', 'w']
    """
    return [".".join(str(entry) for entry in path) for path in optree.tree_paths(tree, namespace=NAMESPACE)]


def map_named(function: Callable[[str, Any], Any], tree: PyTree) -> PyTree:
    """Apply `function(name, leaf)` to every leaf, with the names of `leaf_names`."""
    values, spec = flatten(tree)
    return unflatten(spec, [function(name, leaf) for name, leaf in zip(leaf_names(tree), values, strict=True)])


def split(tree: PyTree, keep: Callable[[str, Any], bool]) -> tuple[PyTree, PyTree]:
    """Return two trees like `tree`: one with the leaves for which `keep(name, leaf)` is true, one with the rest.

    Each has None in the places of the other one's leaves. `overlay` combines them again.
    """
    values, spec = flatten(tree)
    pairs = [(leaf, keep(name, leaf)) for name, leaf in zip(leaf_names(tree), values, strict=True)]
    return (
        unflatten(spec, [leaf if is_chosen else None for leaf, is_chosen in pairs]),
        unflatten(spec, [None if is_chosen else leaf for leaf, is_chosen in pairs]),
    )


def overlay(tree: PyTree, other: PyTree | None) -> PyTree:
    """Replace each None in `tree` by the leaf at the same path in `other`, a tree of the same structure.

    Return `tree` itself if `other` is None.
    """
    if other is None:
        return tree
    return optree.tree_map(lambda a, b: b if a is None else a, tree, other, none_is_leaf=True, namespace=NAMESPACE)


def is_blank(tree: PyTree) -> bool:
    """Return whether a tree is None or an empty dict: a fast check for the usual trees without leaves."""
    return tree is None or (isinstance(tree, dict) and not tree)


def is_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a tensor."""
    return isinstance(leaf, Tensor)


def clone(tree: PyTree) -> PyTree:
    """Return a tree of detached copies of the tensors; other leaves are returned as they are."""
    return map(lambda leaf: leaf.detach().clone() if is_tensor(leaf) else leaf, tree)


def take(tree: PyTree) -> PyTree:
    """Return a tree of detached tensors that share no memory with each other.

    A tensor is copied only if it shares its storage with an earlier one, is a view of a part of its storage, wraps
    other tensors, as a quantised weight does, or is sparse.
    """
    seen: set[int] = set()

    def detach(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        if _torch.is_wrapper_subclass(leaf) or leaf.layout != torch.strided:
            return leaf.detach().clone()
        storage = leaf.untyped_storage()
        is_sole_user = storage.data_ptr() not in seen and storage.nbytes() == leaf.numel() * leaf.element_size()
        seen.add(storage.data_ptr())
        return leaf.detach() if is_sole_user else leaf.detach().clone()

    return map(detach, tree)


def cast(tree: PyTree, dtype: torch.dtype) -> PyTree:
    """Convert floating-point tensors to `dtype`; other leaves are returned as they are."""
    return map(lambda leaf: leaf.to(dtype) if is_tensor(leaf) and leaf.is_floating_point() else leaf, tree)


def to(tree: PyTree, device: torch.device | str) -> PyTree:
    """Move every tensor to `device`, asynchronously from pinned memory.

    Return the tree itself if all its leaves are tensors on `device`. A leaf that is not a tensor but has a method
    ``to``, such as a batch of PyTorch Geometric, is copied (not its tensors) before the call, because the method may
    change its object in place. Other leaves are returned as they are.
    """
    if all(type(leaf) is Tensor and leaf.device == device for leaf in leaves(tree)):
        return tree

    def move(leaf: Any) -> Any:
        if is_tensor(leaf):
            return leaf.to(device, non_blocking=True)
        return copy.copy(leaf).to(device) if callable(getattr(leaf, "to", None)) else leaf

    # A PackedSequence is a named tuple of tensors, but its `batch_sizes` must stay on the host; its own `to` does that.
    return optree.tree_map(move, tree, is_leaf=lambda node: isinstance(node, PackedSequence), namespace=NAMESPACE)


def add(tree: PyTree, other: PyTree) -> PyTree:
    """Return ``tree + other``, leaf by leaf. Raises a StructureError if they differ in structure."""
    (values, spec), (others, other_spec) = flatten(tree), flatten(other)
    if spec != other_spec:
        raise StructureError(
            f"add: the trees have the structures {spec} and {other_spec}; needs trees of one structure"
        )
    return unflatten(spec, torch._foreach_add(values, others) if values else [])


def scale(tree: PyTree, factor: Tensor | float) -> PyTree:
    """Return ``factor * tree``, leaf by leaf; `factor` is a number or a 0-d tensor.

    Leaves keep their dtypes; the factor is not rounded to them first.
    """
    values, spec = flatten(tree)
    return unflatten(spec, scale_leaves(values, factor))


def where(condition: Tensor, tree: PyTree, other: PyTree) -> PyTree:
    """Return the leaves of `tree` if the 0-d bool tensor `condition` is true, else those of `other`.

    A leaf that is the same object in both trees is returned as it is. For sparse leaves it waits for the device.
    """

    def choose(a: Any, b: Any) -> Any:
        if a is b:
            return a
        if is_tensor(a) and a.layout not in DENSE:
            return a if condition else b  # `torch.where` takes no sparse tensors.
        return torch.where(condition, a, b)

    return map(choose, tree, other)


def global_norm(tree: PyTree) -> Tensor:
    """Return the Euclidean norm of all leaves together, as a 0-d tensor; 0 for an empty tree.

    Half-precision leaves are summed in float32. Within `ftrain.tree.sharding.over`, the norm of the whole leaves.
    """
    return norm_of(leaves(tree))


def scale_leaves(tensors: list[Tensor], factor: Tensor | float) -> list[Tensor]:
    """`scale` for a list of tensors."""
    # `_foreach_mul` returns 0-d tensors in the dtype of the factor if that is wider, and integers as float32.
    if isinstance(factor, Tensor):
        one_by_one = {tensor.dtype for tensor in tensors} != {factor.dtype}
    else:
        one_by_one = any(_torch.foreach_rounds(tensor) or not tensor.is_floating_point() for tensor in tensors)
    if one_by_one:
        return [(tensor * factor).to(tensor.dtype) for tensor in tensors]
    return list(torch._foreach_mul(tensors, factor)) if tensors else []


def scale_leaves_(tensors: list[Tensor], factor: Tensor | float) -> list[Tensor]:
    """`scale_leaves` in place."""
    if isinstance(factor, Tensor):
        one_by_one = {tensor.dtype for tensor in tensors} != {factor.dtype}
    else:
        one_by_one = any(_torch.foreach_rounds(tensor) or not tensor.is_floating_point() for tensor in tensors)
    if one_by_one:
        return [tensor.mul_(factor) for tensor in tensors]
    if tensors:
        torch._foreach_mul_(tensors, factor)
    return tensors


def scale_in_turn(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Replace the tensors of a list by those of `scale_leaves`, one slice of the list after the other.

    Old tensors to which nothing else refers are freed after each slice, so that there is never a second copy of all.
    """
    if sum(builtins.map(Tensor.numel, tensors)) <= element_slices.LEAST_AT_ONCE:
        tensors[:] = scale_leaves(tensors, factor)
        return
    for part in slices(tensors):
        tensors[part] = scale_leaves(tensors[part], factor)


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """`global_norm` for a list of tensors."""
    shards = sharding.current()
    # Every rank has the 0-d tensors whole; only the first one counts them.
    counted = tensors if shards is None or shards.is_first else [tensor for tensor in tensors if tensor.ndim]
    norms = _norms(counted, 2.0)
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if shards is None:
        return norm
    # A rank whose shards are all empty has no norm from which to take the device and the dtype.
    is_wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    norm = norm.to(device_of(list(tensors)), torch.float64 if is_wide else torch.float32)
    return shards.sum(norm.square()).sqrt()


def all_finite(tree: PyTree) -> Tensor:
    """Return a 0-d bool tensor: whether no leaf holds an infinity or NaN."""
    values = leaves(tree)
    # A sum of squares could overflow although every element is finite; the largest magnitude cannot.
    norms = _norms(values, float("inf"))
    finite = torch.isfinite(torch.stack(norms)).all() if norms else torch.ones((), dtype=torch.bool)
    shards = sharding.current()
    if shards is None:
        return finite
    return shards.sum((~finite).to(device_of(values), torch.int32)) == 0


def _norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the norms of the tensors that have elements, all in float64 if a tensor has it, else in float32."""
    tensors = [*filter(Tensor.numel, tensors)]
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes & COMPLEX:
        return _norms([real_elements(tensor) for tensor in tensors], order)
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    if dtypes != {wide}:
        tensors = [tensor.to(wide) for tensor in tensors]
    if tensors and isinstance(tensors[0], _torch.FakeTensor) and tensors[0].device == HOST:
        # Inductor fuses single norms, but not the kernel for lists (428 instead of 468 us for a step of 8 leaves).
        return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]
    is_large = max(builtins.map(Tensor.numel, tensors), default=0) > PART
    if is_large and order == 2.0 and wide == torch.float32 and tensors[0].device == HOST:
        tensors = in_parts(tensors)
    try:
        return list(torch._foreach_norm(tensors, order)) if tensors else []
    except RuntimeError:
        if all(tensor.layout in DENSE for tensor in tensors):
            raise
        return _norms([real_elements(tensor) for tensor in tensors], order)


def path(root: str, name: str) -> str:
    """Return the path of a leaf for a message: `root.name`, or `root` if the tree is the leaf itself.

    >>> path("batch", "x.0"), path("batch", "")
    ('batch.x.0', 'batch')
    """
    return f"{root}.{name}" if name else root


def batch_length(batch: PyTree) -> int | None:
    """Return the length of the first axis of the first tensor or NumPy array that has one; None if there is none."""
    return next((leaf.shape[0] for leaf in leaves(batch) if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim), None)


def describe(leaf: Any) -> str:
    """Return the dtype and shape of a tensor as text, ``float32[3, 4]``; for another leaf, the name of its class."""
    if not is_tensor(leaf):
        return type(leaf).__name__
    if leaf.is_nested:
        return f"a nested {dtype_name(leaf.dtype)} tensor"
    text = f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"
    return text if leaf.layout == torch.strided else f"a {dtype_name(leaf.layout)} {text} tensor"


def signature(tree: PyTree) -> dict[str, str]:
    """Return a dict from the name of every leaf to its description by `describe`."""
    return {name: describe(leaf) for name, leaf in zip(leaf_names(tree), leaves(tree), strict=True)}


def _described(tree: PyTree) -> dict[tuple[str, ...], str]:
    """`signature` by path: different paths can have the same name (keys that contain a dot)."""
    paths = [tuple(str(entry) for entry in path) for path in optree.tree_paths(tree, namespace=NAMESPACE)]
    return {path: describe(leaf) for path, leaf in zip(paths, leaves(tree), strict=True)}


def require_same(function: str, subject: str, tree: PyTree, like: PyTree) -> None:
    """Check that `tree` has the structure of `like`: the path, shape and dtype of every leaf.

    Raises a StructureError that lists the paths that differ; `subject` names the tree in the message.
    """
    actual, expected = _described(tree), _described(like)
    missing = [f"{'.'.join(path)}: missing, needs {text}" for path, text in expected.items() if path not in actual]
    extra = [f"{'.'.join(path)}: unexpected {text}" for path, text in actual.items() if path not in expected]
    different = [
        f"{'.'.join(path)}: found {actual[path]}, needs {text}"
        for path, text in expected.items()
        if path in actual and actual[path] != text
    ]
    problems = missing + extra + different
    if problems:
        raise StructureError(
            f"{function}: {subject} does not have the structure this step works on:{first_lines(problems)}"
        )


def device_of(tree: PyTree) -> torch.device:
    """Return the device of the first leaf; the CPU for an empty tree."""
    # Nested dicts, the usual case, without a call of optree: steps call this often.
    node = tree
    while isinstance(node, dict) and node:
        node = next(iter(node.values()))
    first = node if isinstance(node, Tensor) else next(iter(optree.tree_iter(tree, namespace=NAMESPACE)), None)
    return first.device if isinstance(first, Tensor) else HOST


def device_off_host(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of the first tensor that is not on the CPU; the CPU if there is none.

    It skips counters and keys, which are on the CPU wherever the parameters are.
    """
    return next((tensor.device for tensor in tensors if tensor.device != HOST), HOST)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix ``torch.``.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")
