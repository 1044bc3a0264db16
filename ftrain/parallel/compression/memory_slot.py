"""The memory of compression methods in the state: ``state.slots["sharded"]``.

It is a tree like the parameters, with the `Memory` of a leaf in its place. Every tensor has one more axis in front. In
a residual it is that of the ranks that add up their gradients: each has its row. In other tensors it is that of the
blocks of a leaf if the ranks of one copy of the state hold different blocks, else 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import optree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftrain import tree
from ftrain._torch import dtensor
from ftrain.parallel.compression.method import RESIDUAL, Compression, Memory
from ftrain.parallel.partition import Part
from ftrain.types import NAMESPACE, PyTree, TrainState, replace

SLOT = "sharded"
"""The name of the slot, which is the name of the wrapper."""


@dataclass(frozen=True)
class Stored:
    """The memory of a method on a mesh, as it is stored in the state.

    Args:
        method: method that has a memory.
        mesh: mesh of shape (replicate, shard).
        of_blocks: whether blocks of gradients, divided over the axis ``shard``, are added up by the ranks
            of the axis ``replicate``. Otherwise whole gradients are added up by all ranks.
    """

    method: Compression
    mesh: DeviceMesh
    of_blocks: bool

    def init(self, params: PyTree) -> PyTree:
        """Return the memory before the first step, given parameters or DTensors of them."""
        leaves, spec = tree.flatten(params)
        return tree.unflatten(spec, [self._of_leaf(index, leaf) for index, leaf in enumerate(leaves)])

    def _of_leaf(self, index: int, leaf: Tensor) -> Memory:
        local, init = dtensor.local_part(leaf), cast(Callable[..., Memory], self.method.init)
        if not (self.of_blocks and leaf.ndim):
            memory = init(index, local.new_empty(leaf.shape), None)
            return {
                name: self._row(each, leaf, None) if name == RESIDUAL else each[None] for name, each in memory.items()
            }
        size = self.mesh.size(1)
        part = Part.of(leaf.shape, size)
        shape = [*leaf.shape]
        shape[part.axis] = part.block
        memory = init(index, local.new_empty(shape), part.axis)
        for name, each in memory.items():
            if name == RESIDUAL:
                # The last blocks may be shorter.
                length = part.range(self.mesh.get_local_rank(1))[1]
                memory[name] = self._row(each.narrow(part.axis, 0, length).clone(), leaf, part.axis)
            else:
                memory[name] = dtensor.from_local(each[None], self.mesh, (None, 0), (size, *each.shape))
        return memory

    def _row(self, residual: Tensor, leaf: Tensor, axis: int | None) -> Tensor:
        """Return the residuals of a leaf of all ranks, given that of this rank and the axis that it is a block of."""
        axes: tuple[int | None, ...]
        if self.of_blocks:
            axes, rows = (0, None if axis is None else axis + 1), self.mesh.size(0)
        else:
            axes, rows = tuple(None if size == 1 else 0 for size in self.mesh.shape), self.mesh.size()
        return dtensor.from_local(residual[None], self.mesh, axes, (rows, *leaf.shape))


def memories_of(stored: PyTree, params: optree.PyTreeSpec) -> list[Memory]:
    """Return the memory of each leaf of the parameters, given the local parts of what is in the state."""
    memories: list[Any] = params.flatten_up_to(stored)
    return [{name: each[0] for name, each in memory.items()} for memory in memories]


def stored_of(memories: list[Memory], params: optree.PyTreeSpec) -> PyTree:
    """Return the local parts of what is in the state: the inverse of `memories_of`."""
    return tree.unflatten(params, [{name: each[None] for name, each in memory.items()} for memory in memories])


def carried(state: TrainState, like: TrainState) -> TrainState:
    """Return a state of whole tensors with the memory that a state on another mesh has.

    If the number of ranks differs, each gets an equal part of the sum of the residuals: the sum stays the same. What
    else has another shape, is of another method, or is missing, is taken from `like`: as before the first step.
    """
    slots = {name: slot for name, slot in state.slots.items() if name != SLOT}
    if SLOT in like.slots:
        paths, leaves, spec = optree.tree_flatten_with_path(like.slots[SLOT], namespace=NAMESPACE)
        their_paths, theirs, _ = optree.tree_flatten_with_path(state.slots.get(SLOT, {}), namespace=NAMESPACE)
        known = dict(zip(their_paths, theirs, strict=True))
        pairs = zip(paths, leaves, strict=True)
        slots[SLOT] = tree.unflatten(spec, [_carried(path, known.get(path, leaf), leaf) for path, leaf in pairs])
    return replace(state, slots=slots)


def _carried(path: tuple[Any, ...], whole: Tensor, like: Tensor) -> Tensor:
    if whole.shape == like.shape:
        return whole
    if path[-1] == RESIDUAL and whole.shape[1:] == like.shape[1:]:
        return (whole.sum(0, keepdim=True) / like.shape[0]).expand(like.shape)
    return like
