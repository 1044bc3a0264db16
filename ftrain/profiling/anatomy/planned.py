"""Plan a step for ranks that do not exist, as the first of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from ftrain import tree
from ftrain._torch import FakeTensorMode, fake_like
from ftrain._torch.mesh import PlannedMesh
from ftrain.errors import OptionError
from ftrain.parallel.mesh import ALL, REPLICATE, SHARD, planned_mesh
from ftrain.parallel.sharded import NAME as SHARDED
from ftrain.parallel.sharded import sharded
from ftrain.step.step import Step
from ftrain.tree.wrapped_tensors import map_plain
from ftrain.types import TrainState, replace


class MeshLayout(NamedTuple):
    """How a step is divided over ranks.

    There are `replicate` copies of the state, each divided over `shard` ranks, at this `level` of `sharded`.
    """

    replicate: int
    shard: int
    level: int

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"{self.replicate} x {self.shard}, level {self.level}"

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis."""
        return {REPLICATE: self.replicate, SHARD: self.shard, ALL: self.ranks}

    def between_nodes(self, devices: int) -> dict[str, float]:
        """Return for each axis the share of the bytes that a rank sends to another node, if nodes have `devices` ranks.

        Consecutive ranks are in one node. The ranks of a node send equal shares of the bytes between nodes, as with
        several rings at the same time.
        """
        neighbours = {REPLICATE: max(devices // self.shard, 1), SHARD: devices, ALL: devices}
        return {axis: 1 / neighbours[axis] if size > neighbours[axis] else 0.0 for axis, size in self.sizes.items()}


def layout_of(step: Step) -> MeshLayout | None:
    """Return the layout of a step over ranks; None if it is not `sharded`."""
    options = _options_of_sharded(step)
    if options is None:
        return None
    return MeshLayout(options["mesh"].size(0), options["mesh"].size(1), options["level"])


def is_planned(step: Step) -> bool:
    """Whether a step is planned for ranks that do not exist."""
    options = _options_of_sharded(step)
    return options is not None and isinstance(options["mesh"], PlannedMesh)


def plan(function: str, step: Step, mesh: tuple[int, int] | None, level: int | None) -> Step:
    """Return a step planned for ranks that do not exist, which runs only on fake tensors.

    `mesh` and `level` are those of `anatomy`. Raises an OptionError for an invalid mesh or level, or a level without a
    mesh, and a ComposeError if a part of the step cannot run on these ranks.
    """
    options_of_step = _options_of_sharded(step)
    if options_of_step is None and mesh is None:
        raise OptionError(f"{function}: level is {level}, but the step is on one device; pass mesh=, such as (1, 8)")
    options = dict(options_of_step or {})
    sizes = tuple(options["mesh"].shape) if mesh is None else require_pair(function, mesh, "replicate, shard")
    options["mesh"] = planned_mesh(*sizes)
    if mesh is not None:
        options["batches"] = "whole"  # The batch is that of all ranks.
    if level is not None:
        options["level"] = level
        options |= {"gather": "own"} if level != 3 else {}
    planned = sharded(**options)
    if options_of_step is None:
        return step.wrapped(planned)
    wrappers = tuple(planned if each.name == SHARDED else each for each in step.wrappers)
    wrap_optimizer = planned.update.optimizer if planned.update else None
    optimizer = wrap_optimizer(step.optimizer) if wrap_optimizer else step.optimizer
    return dataclasses.replace(step, optimizer=optimizer, wrappers=wrappers)


def require_pair(function: str, mesh: Any, names: str) -> tuple[int, int]:
    """Return a pair of positive whole numbers. Raises an OptionError for anything else."""
    is_pair = isinstance(mesh, tuple | list) and len(mesh) == 2
    if not is_pair or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in mesh):
        raise OptionError(f"{function}: mesh is {mesh!r}; needs ({names}), two positive whole numbers such as (8, 64)")
    return mesh[0], mesh[1]


def planned_state(step: Step, state: TrainState) -> TrainState:
    """Return the state of a planned step as fake tensors, from a state of the original step, whole or divided."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parts = state.params, state.frozen, state.buffers
    # The shape of a DTensor is that of the whole tensor.
    params, frozen, buffers = tree.map(partial(map_plain, lambda plain: fake_like(mode, plain, tree.HOST)), parts)
    with mode:
        for wrapper in step.wrappers:
            if wrapper.step and wrapper.step.distribute:
                params, frozen, buffers = wrapper.step.distribute(params, frozen, buffers)
        opt_state, slots = step.optimizer.init(params), step.init_slots(params)
    return replace(state, params=params, frozen=frozen, buffers=buffers, opt_state=opt_state, slots=slots)


def _options_of_sharded(step: Step) -> Mapping[str, Any] | None:
    return next((wrapper.options for wrapper in step.wrappers if wrapper.name == SHARDED), None)
