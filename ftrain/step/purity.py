"""Check that a loss is a pure function: it gets new containers, and must not write to the tensors in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import LossError
from ftrain.step.batch_notes import explain
from ftrain.types import LossFn, LossOutput, PyTree

LEAF_WRITTEN = "a leaf Variable that requires grad"
"""Part of torch's error when a leaf that requires a gradient is written in place."""


PARTS = "params", "frozen", "batch", "buffers"
"""The inputs of a loss, in the order in which `call` takes them."""


def call(loss: LossFn, leaves: Sequence[Any], spec: optree.PyTreeSpec, *, rng: Tensor | None, name: str) -> LossOutput:
    """Call a loss and check that it changed none of its inputs.

    Args:
        loss: in its full form.
        leaves: of the tuple ``(params, frozen, batch, buffers)``.
        spec: the structure of that tuple.
        rng: the key of the step.
        name: the name of the loss in error messages.

    Raises:
        LossError: when it wrote to a tensor in place; the message has the path.
        StructureError: when the buffers it returns are not like those it got.
    """
    # New containers, which the loss may change.
    params, frozen, batch, buffers = spec.unflatten(leaves)
    old_versions = versions(leaves)
    try:
        output = loss(merge(params, frozen), batch, rng=rng, buffers=buffers)
    except Exception as error:
        if isinstance(error, RuntimeError) and LEAF_WRITTEN in str(error):
            raise _changed(name, _written(loss, leaves, spec, rng), spec) from error
        explain(error, name, (params, frozen), batch)
        raise
    new_versions = versions(leaves)
    if new_versions != old_versions:
        changed = [new != old for new, old in zip(new_versions, old_versions, strict=True)]
        raise _changed(name, changed.index(True), spec)
    if not (tree.is_blank(output[2]) and tree.is_blank(buffers)):
        _require_like(output[2], tree.unflatten(spec, leaves)[3], name)
    return output


def as_tree(batch: Any) -> PyTree:
    """Convert a mapping that is no dict, such as a `BatchEncoding` of transformers, to a dict, which is a tree."""
    return dict(batch) if not isinstance(batch, dict) and isinstance(batch, Mapping) else batch


def merge(params: PyTree, frozen: PyTree) -> PyTree:
    """Put trainable and frozen parameters back together; each is None where the other has a leaf."""
    return params if frozen is None else tree.overlay(params, frozen)


def versions(leaves: Sequence[Any]) -> list[int | None]:
    """Return how often each tensor was written in place; None for other leaves and for inference tensors."""
    try:
        return [*map(_torch.version_of, leaves)]
    except (AttributeError, RuntimeError):
        # Some leaf has no count. To look at each leaf first would take twice as long in the usual case.
        return [_version_or_none(leaf) for leaf in leaves]


def _version_or_none(leaf: Any) -> int | None:
    if not isinstance(leaf, Tensor) or leaf.is_inference():
        return None
    return _torch.version_of(leaf)


def _written(loss: LossFn, leaves: Sequence[Any], spec: optree.PyTreeSpec, rng: Tensor | None) -> int:
    """Find the leaf that a loss writes in place, by running it on copies that it may write to."""
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    old_versions = versions(copies)
    params, frozen, batch, buffers = tree.unflatten(spec, copies)
    with torch.enable_grad():
        loss(merge(params, frozen), batch, rng=rng, buffers=buffers)
    changed = [new != old for new, old in zip(versions(copies), old_versions, strict=True)]
    return changed.index(True) if any(changed) else 0


def _changed(name: str, index: int, spec: optree.PyTreeSpec) -> LossError:
    parts = dict(zip(PARTS, tree.unflatten(spec, range(spec.num_leaves)), strict=True))
    path = tree.leaf_names(parts)[tree.leaves(parts).index(index)]
    return LossError(
        f"{name}: changed its input {path} in place; a loss must be a pure function: work on a copy "
        "(x = x.clone()), and return new buffers instead of writing them"
    )


def _require_like(returned: PyTree, buffers: PyTree, name: str) -> None:
    new, old = tree.flatten(returned), tree.flatten(buffers)
    if new[1] == old[1] and all(
        isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype for a, b in zip(new[0], old[0], strict=True)
    ):
        return
    tree.require_same(name, "the tree of buffers it returned", returned, buffers)
