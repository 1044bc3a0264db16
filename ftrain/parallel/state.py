"""The state of a sharded run: its leaves are DTensors, and a step computes on their local parts."""

from __future__ import annotations

import operator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftrain import tree
from ftrain._torch import dtensor, is_wrapper_subclass
from ftrain.checkpoint.lazy_safetensors import StoredTensor
from ftrain.errors import StructureError
from ftrain.parallel.compression.memory_slot import with_memory_like
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part, start_gather_all
from ftrain.step.across_ranks import require_to_gather
from ftrain.tree.sharding import Shards
from ftrain.types import PyTree, TrainState, replace


class Layout(NamedTuple):
    """How the leaves of a state are divided; the part of a leaf that every rank has is None.

    `parts` are of the parameters and the frozen ones together, in the order of `ftrain.tree.leaves`. `shards` is None
    if nothing is divided.
    """

    params_parts: list[Part | None]
    parts: list[Part | None]
    shards: Shards | None


current_layout: ContextVar[Layout] = ContextVar("ftrain_layout")
"""How the state of the current step is divided."""


def divide(params: PyTree, mesh: DeviceMesh, rank: int) -> PyTree:
    """Return a tree of DTensors over a mesh; this rank keeps only copies of its blocks.

    `params` are whole tensors, or tensors in files. Tensors without an axis stay whole, on every rank, and so do
    wrapper subclasses, such as quantised weights. `rank` is the rank on the axis ``shard``.
    """
    size = mesh.size(1)

    def block(leaf: Tensor | StoredTensor) -> Tensor | StoredTensor:
        stays_whole = not leaf.ndim or (isinstance(leaf, Tensor) and is_wrapper_subclass(leaf))
        return leaf if stays_whole else block_of(leaf, Part.of(leaf.shape, size), mesh, rank)

    return tree.map(block, params)


def require_own_shards(parts: PyTree, mesh: DeviceMesh, level: int) -> None:
    """Check that the DTensors in a tree are divided as `divide` does. Raises a StructureError if one is not."""
    for name, leaf in zip(tree.leaf_names(parts), tree.leaves(parts), strict=True):
        if not dtensor.is_dtensor(leaf):
            continue
        is_own = level and leaf.device_mesh == mesh
        if not is_own or dtensor.axes_of(leaf) != [None, Part.of(leaf.shape, mesh.size(1)).axis]:
            needs = f"a whole tensor, or a shard as level {level} has it on {mesh}" if level else "a whole tensor"
            raise StructureError(
                f"Step.init: {name} is a DTensor on {leaf.device_mesh} with the placements {leaf.placements}; needs "
                f"{needs}. Pass the tensors of ft.parallel.whole(state)"
            )


def block_of(whole: Tensor | StoredTensor, part: Part, mesh: DeviceMesh, rank: int) -> Tensor:
    """Return the DTensor of a whole tensor; this rank keeps only a copy of its block."""
    return dtensor.from_local(_copied(part.take(whole, rank)), mesh, (None, part.axis), whole.shape)


def _copied(block: Tensor) -> Tensor:
    # An empty block, too, needs the strides of a contiguous one: else its rank alone would compile the step again.
    return block.clone(memory_format=torch.contiguous_format)


def whole(state: PyTree) -> PyTree:
    """Return a state, or part of one, with whole tensors in place of the DTensors; every rank must call it.

    Use it to evaluate, to save, or to fill a module: ``ft.to_module(module, ft.parallel.whole(state))``.

    Raises:
        RankError: when another rank does not call it.
    """
    require_to_gather("whole", state)
    return tree.map(dtensor.whole, state)


def divided(state: PyTree, like: PyTree) -> PyTree:
    """Return a state of whole tensors, sharded as another state of the same structure is: the inverse of `whole`.

    Use it to continue on another mesh: ``ft.parallel.divided(whole_state, like=step.init())``. If the number
    of ranks differs, each rank gets an equal part of what a compression of gradients has not sent yet.

    Raises:
        StructureError: when the states differ in the name, shape or dtype of a leaf.
    """
    if isinstance(like, TrainState) and isinstance(state, TrainState):
        state = with_memory_like(state, like)
    tree.require_same("divided", "the state", state, like)

    def leaf_like(leaf: Any, like: Any) -> Any:
        if dtensor.is_dtensor(leaf):
            return leaf
        if not dtensor.is_dtensor(like):
            return leaf.to(like.device) if tree.is_tensor(leaf) else leaf
        local, mesh = leaf.to(like.device), like.device_mesh
        for mesh_axis, axis in enumerate(dtensor.axes_of(like)):
            if axis is not None:
                part = Part(tuple(local.shape), axis, mesh.size(mesh_axis))
                local = part.take(local, mesh.get_local_rank(mesh_axis))
        return dtensor.with_local_part(like, _copied(local))

    return tree.map(leaf_like, state, like)


class LocalStates:
    """Makes the local parts of states of DTensors, and DTensors of local parts.

    The layout is computed once for consecutive states of one structure.
    """

    def __init__(self, mesh: DeviceMesh, level: int, ranks: Group) -> None:
        self._mesh, self._level, self._ranks = mesh, level, ranks
        self._structure: Any = None
        self._specs: list[Any] = []
        self._is_divided = self._gathers_frozen = False
        self._layout = Layout([], [], None)

    def take(self, state: TrainState) -> tuple[TrainState, Layout]:
        """Return a state of the local parts of all DTensors, and how the parameters are divided."""
        leaves, structure = tree.flatten(state)
        specs = dtensor.specs(leaves)
        if structure != self._structure or not all(map(operator.is_, specs, self._specs)):
            self._require_fitting(state, leaves)
            self._layout = self._layout_of(state)
            self._structure, self._specs = structure, specs
            self._is_divided = any(specs)
            frozen_leaves = tree.leaves(state.frozen)
            self._gathers_frozen = self._level < 3 and any(map(dtensor.is_dtensor, frozen_leaves))
        local = tree.unflatten(structure, dtensor.local_parts(leaves)) if self._is_divided else state
        if self._gathers_frozen:
            local = replace(local, frozen=self._whole_frozen(state.frozen, local.frozen))
        return local, self._layout

    def _whole_frozen(self, frozen: PyTree, local: PyTree) -> PyTree:
        """Return whole frozen parameters, for a loss that gathers only trained ones.

        They are divided if they are the trained parameters of another state, as in a GAN.
        """
        local_leaves, spec = tree.flatten(local)
        gathered = start_gather_all(self._ranks, local_leaves, [_part(leaf) for leaf in tree.leaves(frozen)])
        return tree.unflatten(spec, gathered())

    def _layout_of(self, state: TrainState) -> Layout:
        params = tree.leaves(state.params)
        all_params = params if state.frozen is None else tree.leaves(tree.overlay(state.params, state.frozen))
        shards = None
        if self._level and self._ranks.size > 1:
            shapes = {name: tuple(leaf.shape) for name, leaf in zip(tree.leaf_names(state.params), params, strict=True)}
            shards = Shards(self._ranks.sum, self._ranks.rank == 0, shapes)
        return Layout([_part(leaf) for leaf in params], [_part(leaf) for leaf in all_params], shards)

    def put_back(self, local: TrainState, state: TrainState) -> TrainState:
        """Return a state whose leaves are DTensors with the local parts of `local`, placed as those of `state`."""
        local = replace(local, step=state.step, rng=state.rng)
        if not self._is_divided:
            return local
        # No step changes the frozen parameters, and the loss may have got them whole.
        leaves, structure = tree.flatten(replace(local, frozen=None))
        likes = tree.leaves(replace(state, frozen=None))
        new: TrainState = tree.unflatten(structure, dtensor.with_local_parts(likes, leaves))
        return replace(new, frozen=state.frozen)

    def _require_fitting(self, state: TrainState, leaves: list[Any]) -> None:
        """Raises a StructureError for a DTensor of another mesh, or parameters that another level has divided."""
        meshes = {leaf.device_mesh for leaf in leaves if dtensor.is_dtensor(leaf)}
        if any(other != self._mesh for other in meshes):
            raise StructureError(
                f"sharded: the state is divided over {', '.join(map(str, meshes))}; this step works on {self._mesh}. "
                "Bring it there with ft.parallel.divided(ft.parallel.whole(state), like=step.init())"
            )
        is_divided = any(dtensor.is_dtensor(leaf) for leaf in tree.leaves(state.params))
        # 0-d leaves are not divided.
        can_be_divided = any(leaf.ndim for leaf in tree.leaves(state.params))
        if is_divided != (self._level > 0 and can_be_divided):
            needs = "whole tensors, as level 0" if self._level == 0 else f"DTensors, as level {self._level}"
            raise StructureError(
                f"sharded: the leaves of the state are {'DTensors' if is_divided else 'whole tensors'}; this step "
                f"needs {needs} has them. Make the state with step.init(), or ft.parallel.divided(state, "
                "like=step.init())"
            )


def _part(leaf: Tensor) -> Part | None:
    if not dtensor.is_dtensor(leaf):
        return None
    (axis,) = (axis for axis in dtensor.axes_of(leaf) if axis is not None)
    return Part(tuple(leaf.shape), axis, leaf.device_mesh.size(1))
