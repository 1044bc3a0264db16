"""The memory of compression methods in the state: ``state.slots["sharded"]``.

It is a tree like the parameters, with a `Memory` in place of each leaf. Every tensor has one more axis in front. In a
residual this is the axis of the ranks that add up their gradients: each rank has a row. In other tensors it is the axis
of the blocks of a leaf, if the ranks of one copy of the state hold different blocks; else its length is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftrain import tree
from ftrain._torch import dtensor
from ftrain.parallel.compression.method import RESIDUAL, Memory
from ftrain.parallel.partition import Part
from ftrain.types import NAMESPACE, PyTree, TrainState, replace

SLOT = "sharded"
"""The name of the slot, which is the name of the wrapper."""


def first_memory(
    init: Callable[[int, Tensor, int | None], Memory], mesh: DeviceMesh, of_blocks: bool, params: PyTree
) -> PyTree:
    """Return the memory before the first step. `init` is that of the method; `params` may be DTensors.

    If `of_blocks`, blocks of gradients, divided over the axis ``shard``, are added up by the ranks of the axis
    ``replicate``. Otherwise whole gradients are added up by all ranks.
    """

    def of_leaf(index: int, leaf: Tensor) -> Memory:
        part = Part.of(leaf.shape, mesh.size(1)) if of_blocks and leaf.ndim else None
        shape, axis = (leaf.shape, None) if part is None else (part.shape_of(0), part.axis)
        memory = init(index, dtensor.local_part(leaf).new_empty(shape), axis)
        return {
            name: stored_residual(tensor, part, leaf) if name == RESIDUAL else stored_block(tensor, part)
            for name, tensor in memory.items()
        }

    def stored_residual(residual: Tensor, part: Part | None, leaf: Tensor) -> Tensor:
        if of_blocks:
            rows = mesh.size(0)
            axes = [0, None if part is None else part.axis + 1]
        else:
            rows = mesh.size()
            axes = [None if size == 1 else 0 for size in mesh.shape]
        if part is not None:  # The last blocks may be shorter.
            _, length = part.range(mesh.get_local_rank(1))
            residual = residual.narrow(part.axis, 0, length).clone()
        return dtensor.from_local(residual[None], mesh, axes, (rows, *leaf.shape))

    def stored_block(tensor: Tensor, part: Part | None) -> Tensor:
        block = tensor[None]
        return block if part is None else dtensor.from_local(block, mesh, (None, 0), (mesh.size(1), *tensor.shape))

    leaves, spec = tree.flatten(params)
    return tree.unflatten(spec, [of_leaf(index, leaf) for index, leaf in enumerate(leaves)])


def memories_of(stored: PyTree, params: optree.PyTreeSpec) -> list[Memory]:
    """Return the memory of each leaf of the parameters, given the local parts of the slot."""
    memories: list[Any] = params.flatten_up_to(stored)
    return [{name: tensor[0] for name, tensor in memory.items()} for memory in memories]


def stored_of(memories: list[Memory], params: optree.PyTreeSpec) -> PyTree:
    """Return the local parts of the slot, given the memory of each leaf: the inverse of `memories_of`."""
    return tree.unflatten(params, [{name: tensor[None] for name, tensor in memory.items()} for memory in memories])


def with_memory_like(state: TrainState, like: TrainState) -> TrainState:
    """Return a state of whole tensors, with its memory in the shapes of that of `like`, a state on another mesh.

    If the number of ranks differs, each gets an equal part of the sum of the residuals: the sum stays the same. A
    tensor that is missing, of another method, or otherwise of another shape is that of `like`, as before the first
    step.
    """
    slots = {name: slot for name, slot in state.slots.items() if name != SLOT}
    if SLOT in like.slots:
        old_paths, old_tensors, _ = optree.tree_flatten_with_path(state.slots.get(SLOT, {}), namespace=NAMESPACE)
        old = dict(zip(old_paths, old_tensors, strict=True))
        paths, likes, spec = optree.tree_flatten_with_path(like.slots[SLOT], namespace=NAMESPACE)
        pairs = zip(paths, likes, strict=True)
        slots[SLOT] = tree.unflatten(spec, [_memory_like(path, old.get(path, new), new) for path, new in pairs])
    return replace(state, slots=slots)


def _memory_like(path: tuple[Any, ...], whole: Tensor, like: Tensor) -> Tensor:
    if whole.shape == like.shape:
        return whole
    if path[-1] == RESIDUAL and whole.shape[1:] == like.shape[1:]:
        return (whole.sum(0, keepdim=True) / like.shape[0]).expand(like.shape)
    return like
