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
from ftrain.optim.partial_update import ParamGroup
from ftrain.optim.structure_cache import StructureCache
from ftrain.parallel.mesh import Group
from ftrain.parallel.state import block_of
from ftrain.parallel.whole_update.exchange import from_owners, to_owners
from ftrain.parallel.whole_update.ownership import (
    Plan,
    Round,
    assign,
    parts_of_state,
    plan,
    single_groups,
    split_of,
    wholes_of,
)
from ftrain.tree import sharding
from ftrain.types import Hyper, Optimizer, PyTree


@dataclass(frozen=True, kw_only=True)
class _OfRanks(Optimizer):
    """An optimizer on ranks, and the one that it was made of."""

    of_one_rank: Optimizer


def whole_update(optimizer: Optimizer, ranks: Group, owners: Mapping[str, int] | None = None) -> Optimizer:
    """Return an optimizer of divided leaves that computes the same, to the bit, as one of whole leaves does.

    Its `init` makes DTensors of DTensors. Its `update` gets the parts of this rank within `ftrain.tree.sharding.over`;
    all ranks must call both.

    Args:
        optimizer: one that has a `split`; one that this function has returned is used as before.
        ranks: ranks over which leaves are divided.
        owners: name of a parameter -> the rank that updates it. Default: all ranks update about equally many elements.
    """
    optimizer = optimizer.of_one_rank if isinstance(optimizer, _OfRanks) else optimizer

    def make_plan(specs: Sequence[optree.PyTreeSpec], columns: list[list[Tensor]]) -> Plan:
        params, opt_state, _ = map(tree.unflatten, specs, columns)
        owner_of = assign(optimizer, wholes_of(params), ranks.size) if owners is None else owners
        return plan(optimizer, params, opt_state, owner_of, ranks)

    plans = StructureCache(make_plan)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        if sharding.current() is None:
            return optimizer.update(grads, opt_state, params, hyper, donate=donate)
        current, (leaves, state, gradients) = plans(params, opt_state, grads)
        return _Update(current, ranks, leaves, state, hyper, donate=donate).make(gradients)

    def split(params: PyTree, parts: Sequence[Sequence[int]]) -> list[Optimizer]:
        wholes = wholes_of(params)
        owner_of = assign(optimizer, wholes, ranks.size) if owners is None else owners
        again = partial(_split_of_part, optimizer, wholes)
        groups = split_of(optimizer, wholes, parts)
        return [whole_update(dataclasses.replace(group, split=again), ranks, owner_of) for group in groups]

    def init(params: PyTree) -> PyTree:
        is_divided = any(dtensor.is_dtensor(leaf) for leaf in tree.leaves(params))
        return _divided_state(optimizer, params, ranks) if is_divided else optimizer.init(params)

    fields = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(Optimizer)}
    return _OfRanks(**fields | {"init": init, "update": update, "split": split}, of_one_rank=optimizer)


def _split_of_part(
    optimizer: Optimizer, wholes: PyTree, params: PyTree, parts: Sequence[Sequence[int]]
) -> list[Optimizer]:
    """Split the optimizer of all leaves, given indices into the leaves of one of its parts."""
    names, index_of = tree.leaf_names(params), {name: index for index, name in enumerate(tree.leaf_names(wholes))}
    return split_of(optimizer, wholes, [[index_of[names[index]] for index in part] for part in parts])


def _divided_state(optimizer: Optimizer, params: PyTree, ranks: Group) -> PyTree:
    """Return the first state of parameters that are DTensors, made of one whole parameter after another."""
    leaves, spec = tree.flatten(params)
    wholes = tree.unflatten(spec, sharding.abstract(leaves, [leaf.shape for leaf in leaves]))
    state, state_spec = tree.flatten(optimizer.init(wholes))
    singles = single_groups(optimizer, wholes, tree.unflatten(state_spec, state))
    parts = parts_of_state(optimizer, wholes, singles, ranks.size)
    for group, leaf in zip(singles, leaves, strict=True):
        whole = leaf if group.optimizer.by_element else dtensor.whole(leaf)
        (name,) = group.names
        for index, new in zip(group.state_indices, tree.leaves(group.optimizer.init({name: whole})), strict=True):
            part = parts[index]
            if part is not None and not dtensor.is_dtensor(new):
                new = block_of(new, part, leaf.device_mesh, ranks.rank)
            state[index] = new
    return tree.unflatten(state_spec, state)


class _Update:
    """One update of the parts of this rank, and of the leaves that it owns.

    Args:
        plan: plan for these leaves.
        ranks: ranks over which they are divided.
        params: leaves of the parameters.
        state: leaves of the optimizer state.
        hyper: the scheduled values of the step.
        donate: whether `params` and `state` may be written.
    """

    def __init__(
        self, plan: Plan, ranks: Group, params: list[Tensor], state: list[Tensor], hyper: Hyper, *, donate: bool
    ) -> None:
        self._plan, self._ranks, self._hyper, self._donate = plan, ranks, hyper, donate
        self._params, self._state = params, state
        self._new_params, self._new_state = list(params), list(state)
        self._of_all_ranks: dict[int, Tensor] = {}

    def make(self, grads: list[Tensor]) -> tuple[PyTree, PyTree]:
        """Return the new parts of the parameters and of the state, given those of the gradients."""
        if self._plan.local is not None:
            self._make_local(self._plan.local, grads)
        for each in self._plan.rounds:
            self._make_round(each, grads)
        for group, leaf in self._plan.idle:
            self._make_idle(group, leaf)
        for index, new in self._of_all_ranks.items():
            self._new_state[index] = self._state[index].copy_(new) if self._donate else new
        specs = self._plan.specs
        return tree.unflatten(specs[0], self._new_params), tree.unflatten(specs[1], self._new_state)

    def _make_local(self, group: ParamGroup, grads: list[Tensor]) -> None:
        """Update the leaves whose update needs no data of other ranks."""
        state = [self._old_state(index) for index in group.state_indices]
        params, new_state = group.update(
            [grads[index] for index in group.indices],
            state,
            [self._params[index] for index in group.indices],
            self._hyper,
            donate=self._donate,
        )
        for index, leaf in zip(group.indices, params, strict=True):
            self._new_params[index] = leaf
        for index, leaf in zip(group.state_indices, new_state, strict=True):
            if not self._is_shared(index, leaf):
                self._new_state[index] = leaf

    def _make_round(self, each: Round, grads: list[Tensor]) -> None:
        """Update the leaves that ranks own, and this rank's parts of them."""
        params, state = each.params, each.state
        old = [*(self._params[index] for index in params.indices), *(self._state[index] for index in state.indices)]
        parts, owners = [*params.parts, *state.parts], [*params.owners, *state.owners]
        wholes = to_owners(
            self._ranks,
            [*old, *(grads[index] for index in params.indices)],
            [*parts, *params.parts],
            [*owners, *params.owners],
        )
        if each.group is not None:
            wholes = self._updated(each.group, params.indices, state.indices, wholes)
        new = iter(from_owners(self._ranks, wholes, parts, owners, old))
        for index in params.indices:
            self._new_params[index] = self._stored(self._params[index], next(new))
        for index in state.indices:
            self._new_state[index] = self._stored(self._state[index], next(new))

    def _updated(
        self, group: ParamGroup, indices: list[int], state_indices: list[int], wholes: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return the new whole parameters and leaves of their state by their numbers in a round."""
        number_of = {index: number for number, index in enumerate(indices)}
        number_of_state = {index: number for number, index in enumerate(state_indices, len(indices))}
        first_grad = len(indices) + len(state_indices)
        params, new_state = group.update(
            [wholes[first_grad + number_of[index]] for index in group.indices],
            [
                wholes[number_of_state[index]] if index in number_of_state else self._old_state(index)
                for index in group.state_indices
            ],
            [wholes[number_of[index]] for index in group.indices],
            self._hyper,
            donate=True,
        )
        new = {number_of[index]: leaf for index, leaf in zip(group.indices, params, strict=True)}
        for index, leaf in zip(group.state_indices, new_state, strict=True):
            if not self._is_shared(index, leaf):
                new[number_of_state[index]] = leaf
        return new

    def _make_idle(self, group: ParamGroup, leaf: Tensor) -> None:
        """Update zeros to get the state that every rank has, such as the count of updates."""
        zeros = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        (name,) = group.names
        pairs = zip(group.state_indices, tree.leaves(group.optimizer.init({name: zeros})), strict=True)
        state = [self._old_state(index) if index in self._plan.shared else new for index, new in pairs]
        _, new_state = group.update([torch.zeros_like(zeros)], state, [zeros], self._hyper, donate=True)
        for index, new in zip(group.state_indices, new_state, strict=True):
            self._is_shared(index, new)

    def _old_state(self, index: int) -> Tensor:
        # State that every rank has may be read for several groups, and each must see its old value.
        return self._state[index].clone() if index in self._plan.shared else self._state[index]

    def _is_shared(self, index: int, new: Tensor) -> bool:
        """Return whether every rank has a leaf of the state, and if so remember its new value."""
        if index in self._plan.shared:
            self._of_all_ranks[index] = new
        return index in self._plan.shared

    def _stored(self, old: Tensor, new: Tensor) -> Tensor:
        # A copy, because what ranks have sent is one buffer.
        return old.copy_(new) if self._donate else new.clone()
