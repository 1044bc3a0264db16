"""Optimizers that need whole leaves, such as Muon: each rank updates the leaves that it owns.

Between steps all leaves are divided. For the update, the parts of the gradient, the parameter and the state of a leaf
are sent to one rank, and the new parts are sent back: of n ranks, each sends and receives about an n-th of all leaves
and computes an n-th of the update. This is exact whatever an optimizer needs of a leaf: its norm, the means of its
rows, blocks of its elements, its singular values, or the places of elements, from which random numbers are drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import optree
import torch
from torch import Tensor

from ftrain import tree
from ftrain._torch import dtensor
from ftrain.optim.partial_update import ParamGroup, require_splittable
from ftrain.optim.structure_cache import StructureCache
from ftrain.parallel.mesh import Group
from ftrain.parallel.state import block_of
from ftrain.parallel.whole_update.exchange import Key, from_owners, to_owners
from ftrain.parallel.whole_update.ownership import (
    FUNCTION,
    GRADS,
    PARAMS,
    STATE,
    Plan,
    Round,
    assign,
    first_state,
    plan,
    wholes_of,
)
from ftrain.tree import sharding
from ftrain.types import Hyper, Optimizer, PyTree


@dataclass(frozen=True, kw_only=True)
class _OfRanks(Optimizer):
    """An optimizer of divided leaves, and the optimizer of whole leaves from which it was made."""

    of_wholes: Optimizer


def whole_update(optimizer: Optimizer, ranks: Group, owners: Mapping[str, int] | None = None) -> Optimizer:
    """Return an optimizer of divided leaves that computes the same bits as `optimizer` does with whole leaves.

    Its `init` makes DTensors of DTensors. Its `update` gets the parts of this rank within `ftrain.tree.sharding.over`;
    all ranks must call both.

    `optimizer` must have a `split`. If it was returned by this function, the optimizer from which it was made is used.
    `owners` are the ranks that update parameters, by name. Default: all update about equally many elements.
    """
    optimizer = optimizer.of_wholes if isinstance(optimizer, _OfRanks) else optimizer

    def owners_of(wholes: PyTree) -> Mapping[str, int]:
        return assign(optimizer, wholes, ranks.size) if owners is None else owners

    def make_plan(specs: Sequence[optree.PyTreeSpec], columns: list[list[Tensor]]) -> Plan:
        params, opt_state, _ = (tree.unflatten(spec, leaves) for spec, leaves in zip(specs, columns, strict=True))
        return plan(optimizer, params, opt_state, owners_of(wholes_of(params)), ranks)

    plans = StructureCache(make_plan)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        if sharding.current() is None:
            return optimizer.update(grads, opt_state, params, hyper, donate=donate)
        current, columns = plans(params, opt_state, grads)
        trees = zip((PARAMS, STATE, GRADS), columns, strict=True)
        leaves = {(name, index): leaf for name, column in trees for index, leaf in enumerate(column)}
        return _Update(current, ranks, leaves, hyper, donate=donate).make()

    def split(params: PyTree, parts: Sequence[Sequence[int]]) -> list[Optimizer]:
        wholes = wholes_of(params)
        owners_of_all = owners_of(wholes)
        split_again = partial(_split_of_part, optimizer, wholes)
        groups = require_splittable(FUNCTION, optimizer)(wholes, parts)
        return [whole_update(dataclasses.replace(group, split=split_again), ranks, owners_of_all) for group in groups]

    def init(params: PyTree) -> PyTree:
        is_divided = any(dtensor.is_dtensor(leaf) for leaf in tree.leaves(params))
        return _divided_state(optimizer, params, ranks) if is_divided else optimizer.init(params)

    fields = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(Optimizer)}
    return _OfRanks(**fields | {"init": init, "update": update, "split": split}, of_wholes=optimizer)


def _split_of_part(
    optimizer: Optimizer, wholes: PyTree, params: PyTree, parts: Sequence[Sequence[int]]
) -> list[Optimizer]:
    """Split the optimizer of all leaves, given indices into the leaves of one of its parts."""
    names = tree.leaf_names(params)
    index_of = {name: index for index, name in enumerate(tree.leaf_names(wholes))}
    split = require_splittable(FUNCTION, optimizer)
    return split(wholes, [[index_of[names[index]] for index in part] for part in parts])


def _divided_state(optimizer: Optimizer, params: PyTree, ranks: Group) -> PyTree:
    """Return the first state of parameters that are DTensors. One whole parameter is in memory at a time."""
    leaves, spec = tree.flatten(params)
    wholes = tree.unflatten(spec, sharding.abstract(leaves, [leaf.shape for leaf in leaves]))
    opt_state, singles, parts = first_state(optimizer, wholes, ranks.size)
    state, state_spec = tree.flatten(opt_state)
    for group, leaf in zip(singles, leaves, strict=True):
        whole = leaf if group.optimizer.by_element else dtensor.whole(leaf)
        (name,) = group.names
        new_leaves = tree.leaves(group.optimizer.init({name: whole}))
        for index, new in zip(group.state_indices, new_leaves, strict=True):
            part = parts[index]
            if part is not None and not dtensor.is_dtensor(new):
                new = block_of(new, part, leaf.device_mesh, ranks.rank)
            state[index] = new
    return tree.unflatten(state_spec, state)


class _Update:
    """One update of this rank's parts, and of the leaves that it owns. With `donate` it may write both in place."""

    def __init__(self, plan: Plan, ranks: Group, leaves: Mapping[Key, Tensor], hyper: Hyper, *, donate: bool) -> None:
        self._plan, self._ranks, self._leaves, self._hyper, self._donate = plan, ranks, leaves, hyper, donate
        self._new = dict(leaves)
        self._shared: dict[Key, Tensor] = {}

    def make(self) -> tuple[PyTree, PyTree]:
        """Return the new parts of the parameters and of the state."""
        if self._plan.local is not None:
            self._new |= self._updated(self._plan.local, self._leaves, donate=self._donate)
        for one_round in self._plan.rounds:
            self._make_round(one_round)
        for group, leaf in self._plan.idle:
            self._make_idle(group, leaf)
        for key, new in self._shared.items():
            self._new[key] = self._leaves[key].copy_(new) if self._donate else new
        params, state = self._plan.specs
        return (
            tree.unflatten(params, [self._new[PARAMS, index] for index in range(params.num_leaves)]),
            tree.unflatten(state, [self._new[STATE, index] for index in range(state.num_leaves)]),
        )

    def _updated(self, group: ParamGroup, leaves: Mapping[Key, Tensor], *, donate: bool) -> dict[Key, Tensor]:
        """Return the new parameters of a group, and their new state except for the leaves that every rank has."""
        # Shared state may be read for several groups, and each must see its old value: so each gets a copy.
        old_state = [
            self._leaves[STATE, index].clone() if index in self._plan.shared else leaves[STATE, index]
            for index in group.state_indices
        ]
        grads = [leaves[GRADS, index] for index in group.indices]
        old_params = [leaves[PARAMS, index] for index in group.indices]
        params, state = group.update(grads, old_state, old_params, self._hyper, donate=donate)
        new = {(PARAMS, index): leaf for index, leaf in zip(group.indices, params, strict=True)}
        for index, leaf in zip(group.state_indices, state, strict=True):
            if index in self._plan.shared:
                self._shared[STATE, index] = leaf
            else:
                new[STATE, index] = leaf
        return new

    def _make_round(self, one_round: Round) -> None:
        """Update the leaves of a round that this rank owns, and take the new parts of all leaves of the round."""
        wholes = to_owners(self._ranks, self._leaves, {**one_round.leaves, **one_round.grads})
        if one_round.group is not None:
            wholes = self._updated(one_round.group, wholes, donate=True)
        for key, new in from_owners(self._ranks, wholes, one_round.leaves, self._leaves).items():
            # A copy, because a view of the received buffer would keep all of it in memory.
            self._new[key] = self._leaves[key].copy_(new) if self._donate else new.clone()

    def _make_idle(self, group: ParamGroup, leaf: Tensor) -> None:
        """Update zeros to get the state that every rank has, such as the count of updates."""
        (index,), (name,) = group.indices, group.names
        zeros = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        state = zip(group.state_indices, tree.leaves(group.optimizer.init({name: zeros})), strict=True)
        leaves = {(PARAMS, index): zeros, (GRADS, index): torch.zeros_like(zeros)}
        self._updated(group, leaves | {(STATE, index): new for index, new in state}, donate=True)
