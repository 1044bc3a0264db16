"""A step of ranks that do not exist: of any number of them, seen from the first one."""

from __future__ import annotations

import dataclasses
from typing import Any

from ftrain import tree
from ftrain._torch import FakeTensorMode, fake_like
from ftrain._torch.mesh import PlannedMesh
from ftrain.errors import OptionError
from ftrain.parallel.mesh import planned_mesh
from ftrain.parallel.sharded import NAME as SHARDED
from ftrain.parallel.sharded import sharded
from ftrain.profiling.anatomy.mesh_layout import MeshLayout
from ftrain.step.step import Step
from ftrain.step.wrapper import Wrapper
from ftrain.types import TrainState, replace


def layout_of(step: Step) -> MeshLayout | None:
    """Return how a step is divided over ranks; None if it is not `sharded`."""
    wrapper = _sharded(step)
    if wrapper is None or wrapper.options is None:
        return None
    mesh = wrapper.options["mesh"]
    return MeshLayout(mesh.size(0), mesh.size(1), wrapper.options["level"])


def is_planned(step: Step) -> bool:
    """Whether a step is on ranks that do not exist."""
    wrapper = _sharded(step)
    return wrapper is not None and isinstance((wrapper.options or {}).get("mesh"), PlannedMesh)


def plan(function: str, step: Step, mesh: tuple[int, int] | None, level: int | None) -> Step:
    """Return a step like another one on ranks that do not exist, which runs on tensors without values alone.

    Args:
        function: the public function that plans, for errors.
        step: with `sharded` or without.
        mesh: (replicate, shard). Default: that of the step.
        level: of `sharded`. Default: that of the step, or that of `sharded` by default.

    Raises:
        OptionError: for no pair of sizes; for another level; for a level without a mesh.
        ComposeError: when the step has something that cannot be on ranks, or not at this level.
    """
    wrapper, options = _sharded(step), dict[str, Any]()
    if wrapper is not None:
        options |= wrapper.options or {}
    elif mesh is None:
        raise OptionError(f"{function}: level is {level}, of a step on one device; give the ranks, as mesh=(1, 8)")
    sizes = tuple(options["mesh"].shape) if mesh is None else require_pair(function, mesh, "replicate, shard")
    options["mesh"] = planned_mesh(*sizes)
    if mesh is not None:
        options["batches"] = "whole"  # That of a plan for other ranks is of all of them.
    if level is not None:
        options["level"] = level
        options |= {"gather": "own"} if level < 3 else {}
    planned = sharded(**options)
    if wrapper is None:
        return step.wrapped(planned)
    wrappers = tuple(planned if each is wrapper else each for each in step.wrappers)
    replaces = planned.update.optimizer if planned.update else None
    optimizer = replaces(step.optimizer) if replaces else step.optimizer
    return dataclasses.replace(step, optimizer=optimizer, wrappers=wrappers)


def require_pair(function: str, mesh: Any, names: str) -> tuple[int, int]:
    """Return a pair of positive whole numbers.

    Raises:
        OptionError: for anything else.
    """
    is_pair = isinstance(mesh, tuple | list) and len(mesh) == 2
    if not is_pair or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in mesh):
        raise OptionError(f"{function}: mesh is {mesh!r}; needs ({names}), two positive whole numbers such as (8, 64)")
    return mesh[0], mesh[1]


def planned_state(step: Step, state: TrainState) -> TrainState:
    """Return the state of a planned step, as tensors without values, for the parameters of another state.

    Args:
        step: the planned step.
        state: a state of the step that was planned, of whole tensors or divided over any mesh.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parts = state.params, state.frozen, state.buffers
    # The shape of a DTensor is that of the whole tensor.
    params, frozen, buffers = tree.map(lambda leaf: fake_like(mode, leaf, tree.HOST), parts)
    with mode:
        for each in step.wrappers:
            if each.step and each.step.place:
                params, frozen, buffers = each.step.place(params, frozen, buffers)
        opt_state, slots = step.optimizer.init(params), step.init_slots(params)
    return replace(state, params=params, frozen=frozen, buffers=buffers, opt_state=opt_state, slots=slots)


def _sharded(step: Step) -> Wrapper | None:
    return next((wrapper for wrapper in step.wrappers if wrapper.name == SHARDED), None)
