"""Plan which rank updates which leaves whole, and in which order: balanced, and only some of the leaves at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import optree
from torch import Tensor

from ftrain import _torch, tree
from ftrain.optim.partial_update import ParamGroup, by_size, param_groups, require_splittable
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part
from ftrain.parallel.whole_update.exchange import Key, Moved
from ftrain.tree import sharding
from ftrain.types import Optimizer, PyTree

FUNCTION = "sharded"
ROUND_BYTES = 1 << 26
"""Bytes of whole parameters that a rank has at a time, unless one parameter is larger."""


PARAMS, STATE, GRADS = "params", "state", "grads"
"""The trees of a `Key`."""


@dataclass(frozen=True)
class Round:
    """Leaves that are updated at the same time.

    `leaves` are parameters and their state, which are sent to their owners and back; `grads` are only sent to the
    owners. `group` are the parameters that this rank updates, or None.
    """

    leaves: dict[Key, Moved]
    grads: dict[Key, Moved]
    group: ParamGroup | None


@dataclass(frozen=True)
class Plan:
    """How divided leaves are updated; the same on all ranks, except for the groups.

    Args:
        specs: structures of the parameters and of the state.
        local: the parameters whose update needs no data of other ranks, or None.
        rounds: the other leaves.
        shared: indices of the leaves of the state that every rank has.
        idle: groups of one parameter each that other ranks update, with the parameter as a `FakeTensor`. To them belong
            shared leaves of the state that belong to no parameter of this rank.
    """

    specs: tuple[optree.PyTreeSpec, optree.PyTreeSpec]
    local: ParamGroup | None
    rounds: list[Round]
    shared: set[int]
    idle: list[tuple[ParamGroup, Tensor]]


def assign(optimizer: Optimizer, wholes: PyTree, ranks: int) -> dict[str, int]:
    """Return the owners of the parameters whose update needs a whole leaf: name -> rank, with about equal loads.

    `wholes` may be fake. In this module every optimizer has a `split`.
    """
    names, leaves = tree.leaf_names(wholes), tree.leaves(wholes)
    singles = require_splittable(FUNCTION, optimizer)(wholes, [[index] for index in range(len(leaves))])
    needing = [index for index, leaf in enumerate(leaves) if leaf.ndim and not singles[index].by_element]
    owners: dict[str, int] = {}
    loads = [0] * ranks
    for index in sorted(needing, key=lambda index: leaves[index].numel(), reverse=True):
        rank = loads.index(min(loads))
        owners[names[index]] = rank
        loads[rank] += leaves[index].numel()
    return owners


def first_state(optimizer: Optimizer, wholes: PyTree, ranks: int) -> tuple[PyTree, list[ParamGroup], list[Part | None]]:
    """Return the first state of whole parameters, a group for each single parameter, and how the state is divided.

    A leaf of the state that does not belong to one parameter, such as a count of updates, or belongs to a 0-d
    parameter, is not divided: every rank has it.
    """
    opt_state = optimizer.init(wholes)
    leaves, state = tree.leaves(wholes), tree.leaves(opt_state)
    lists = [[index] for index in range(len(leaves))]
    singles = list(param_groups(FUNCTION, optimizer, wholes, opt_state, lists))
    counts = Counter(index for group in singles for index in group.state_indices)
    of_params = {index for group in singles if leaves[group.indices[0]].ndim for index in group.state_indices}
    divided = {index for index in of_params if counts[index] == 1 and state[index].ndim and state[index].numel()}
    parts = [Part.of(leaf.shape, ranks) if index in divided else None for index, leaf in enumerate(state)]
    return opt_state, singles, parts


def wholes_of(params: PyTree) -> PyTree:
    """Return the whole parameters as `FakeTensor`s, given this rank's parts; as they are if none is divided."""
    leaves, spec = tree.flatten(params)
    return tree.unflatten(spec, sharding.wholes(tree.leaf_names(params), leaves))


def plan(optimizer: Optimizer, params: PyTree, opt_state: PyTree, owners: Mapping[str, int], ranks: Group) -> Plan:
    """Return how this rank updates its parts of leaves, and the leaves that it owns.

    `owners` are the ranks that update parameters whole, by name; the other parameters are updated part by part.
    """
    wholes = wholes_of(params)
    names, leaves, state = tree.leaf_names(wholes), tree.leaves(wholes), tree.leaves(opt_state)
    owned: list[list[int]] = [[] for _ in range(ranks.size)]
    local: list[int] = []
    for index, name in enumerate(names):
        (owned[owners[name]] if name in owners else local).append(index)
    chunks = [_chunks(leaves, indices) for indices in owned]
    lists = [*itertools.chain.from_iterable(chunks), *([local] if local else [])]
    groups = iter(list(param_groups(FUNCTION, optimizer, wholes, opt_state, lists)))
    groups_by_rank = [[next(groups) for _ in chunks_of_rank] for chunks_of_rank in chunks]
    local_group = next(groups, None)
    with _torch.without_modes():
        _, singles, state_parts = first_state(optimizer, wholes, ranks.size)
    parts = {(STATE, index): part for index, part in enumerate(state_parts)}
    parts |= {(PARAMS, index): Part.of(leaf.shape, ranks.size) for index, leaf in enumerate(leaves) if leaf.ndim}
    rounds = [_round(of_round, parts, ranks.rank) for of_round in itertools.zip_longest(*groups_by_rank)]
    shared = {index for index, part in enumerate(state_parts) if part is None}
    missing = {index for index in shared if state[index].numel()}
    for group in [*groups_by_rank[ranks.rank], *([local_group] if local_group else [])]:
        missing.difference_update(group.state_indices)
    idle = _idle_groups(zip(singles, leaves, strict=True), missing)
    return Plan((tree.flatten(params)[1], tree.flatten(opt_state)[1]), local_group, rounds, shared, idle)


def _round(groups: Sequence[ParamGroup | None], parts: Mapping[Key, Part | None], rank: int) -> Round:
    """Return a round, given the group that each rank updates in it."""
    leaves: dict[Key, Moved] = {}
    for owner, group in enumerate(groups):
        if group is None:
            continue
        for key in (*((PARAMS, index) for index in group.indices), *((STATE, index) for index in group.state_indices)):
            part = parts[key]
            if part is not None:
                leaves[key] = Moved(part, owner)
    grads = {(GRADS, index): moved for (name, index), moved in leaves.items() if name == PARAMS}
    return Round(leaves, grads, groups[rank])


def _idle_groups(singles: Iterable[tuple[ParamGroup, Tensor]], missing: set[int]) -> list[tuple[ParamGroup, Tensor]]:
    """Return the smallest parameters, with their groups, to which the `missing` leaves of the state belong."""
    idle = []
    for group, leaf in sorted(singles, key=lambda pair: pair[1].numel()):
        if missing.intersection(group.state_indices):
            idle.append((group, leaf))
            missing = missing.difference(group.state_indices)
    return idle


def _chunks(leaves: Sequence[Tensor], indices: Sequence[int]) -> list[list[int]]:
    """Return the indices of the leaves that a rank updates in each round: the largest first."""
    largest_first = sorted(indices, key=lambda index: leaves[index].numel(), reverse=True)
    return [
        [largest_first[number] for number in chunk]
        for chunk in by_size([leaves[index] for index in largest_first], ROUND_BYTES)
    ]
