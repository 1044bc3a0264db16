"""Split an optimizer into one optimizer for each group of parameters, and update group by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import ComposeError
from ftrain.optim.structure_cache import StructureCache
from ftrain.tree import sharding
from ftrain.types import Hyper, Optimizer, PyTree


@dataclass(frozen=True)
class ParamGroup:
    """A group of parameters, their optimizer, and the leaves of the whole optimizer state that belong to them.

    The optimizer takes the parameters as a dict by name. `indices` are their indices among all parameters;
    `state_indices` are the indices of the leaves of their state among all leaves of the state.
    """

    optimizer: Optimizer
    names: list[str]
    indices: list[int]
    state_indices: list[int]
    state_spec: optree.PyTreeSpec

    def update(
        self, grads: Sequence[Tensor], state: Sequence[Tensor], params: Sequence[Tensor], hyper: Hyper, *, donate: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the updated parameters, and the leaves of their state, in the order of `names` and `state_indices`."""
        grads_by_name, params_by_name = (dict(zip(self.names, leaves, strict=True)) for leaves in (grads, params))
        opt_state = tree.unflatten(self.state_spec, list(state))
        new_params, new_state = self.optimizer.update(grads_by_name, opt_state, params_by_name, hyper, donate=donate)
        return [new_params[name] for name in self.names], tree.leaves(new_state)


@dataclass
class GroupedUpdate:
    """An update of all parameters, group by group: call `update` once for each group, in any order, then `finish`.

    `params` and `state` are the leaves of the parameters and of the optimizer state, and `specs` the structures of
    both. If they are donated, the update may write to them. Each parameter is in one group.
    """

    groups: list[ParamGroup]
    params: list[Tensor]
    state: list[Tensor]
    specs: tuple[optree.PyTreeSpec, optree.PyTreeSpec]
    hyper: Hyper
    donate: bool

    def __post_init__(self) -> None:
        self._new_params, self._new_state = list(self.params), list(self.state)
        counts = Counter(index for group in self.groups for index in group.state_indices)
        # Every group must read the old value of a leaf that several groups share, such as the count of updates.
        self._shared = {index for index, count in counts.items() if count > 1}

    def state_of(self, group: ParamGroup) -> list[Tensor]:
        """Return the leaves of the state of a group, which its optimizer may write if the state is donated."""
        return [self.state[i].clone() if i in self._shared else self.state[i] for i in group.state_indices]

    def update(self, group: ParamGroup, grads: Sequence[Tensor], state: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Update the parameters of one group, and return the leaves of its new state.

        `state` are copies of the leaves of its old state. Default: ``state_of(group)``.
        """
        old_state = self.state_of(group) if state is None else state
        old_params = [self.params[index] for index in group.indices]
        params, new_state = group.update(grads, old_state, old_params, self.hyper, donate=self.donate)
        for index, leaf in zip(group.indices, params, strict=True):
            self._new_params[index] = leaf
        for index, leaf, old in zip(group.state_indices, new_state, old_state, strict=True):
            # A leaf that the optimizer did not replace keeps the tensor of the whole state.
            self._new_state[index] = self.state[index] if leaf is old and index not in self._shared else leaf
        return new_state

    def replace_state(self, group: ParamGroup, state: Sequence[Tensor]) -> None:
        """Set the leaves of the new state of a group, after an `update` of copies."""
        for index, leaf in zip(group.state_indices, state, strict=True):
            if index not in self._shared:
                self._new_state[index] = leaf

    def finish(self) -> tuple[PyTree, PyTree]:
        """Return the parameters and the state after the updates of all groups."""
        if self.donate:
            for index in self._shared:
                if self._new_state[index] is not self.state[index]:
                    self._new_state[index] = self.state[index].copy_(self._new_state[index])
        return tree.unflatten(self.specs[0], self._new_params), tree.unflatten(self.specs[1], self._new_state)


class UpdateSplitter:
    """Splits the updates of an optimizer into groups of parameters, and caches the groups of the last structure.

    `group` is a function from the leaves of the parameters, as they are before `sharded` divides them, to the indices
    of the leaves of each group. Raises a ComposeError that names `function` if the optimizer has no `split`.
    """

    def __init__(
        self, function: str, optimizer: Optimizer, group: Callable[[Sequence[Tensor]], Sequence[Sequence[int]]]
    ) -> None:
        require_splittable(function, optimizer)

        def split(
            specs: Sequence[optree.PyTreeSpec], columns: list[list[Tensor]]
        ) -> tuple[list[ParamGroup], tuple[optree.PyTreeSpec, optree.PyTreeSpec]]:
            params, opt_state = map(tree.unflatten, specs, columns)
            # Sizes are those of whole leaves, so that all ranks have the same groups.
            parts = group(sharding.wholes(tree.leaf_names(params), columns[0]))
            return list(param_groups(function, optimizer, params, opt_state, parts)), (specs[0], specs[1])

        self._split = StructureCache(split)

    def begin(self, params: PyTree, opt_state: PyTree, hyper: Hyper, *, donate: bool) -> GroupedUpdate:
        """Start the update of all parameters: return it before the update of the first group."""
        (groups, specs), (param_leaves, state_leaves) = self._split(params, opt_state)
        return GroupedUpdate(groups, param_leaves, state_leaves, specs, hyper, donate)


def require_optimizer(function: str, name: str, optimizer: Any) -> Optimizer:
    """Return an optimizer that may be a part of another one.

    Raises a ComposeError for anything else, and for an adjustable optimizer: a step reads the factors of the outermost
    optimizer only.
    """
    if not isinstance(optimizer, Optimizer):
        raise ComposeError(f"{function}: {name} is {optimizer!r}; needs an optimizer of ftrain.optim")
    if optimizer.factors is not None:
        raise ComposeError(f"{function}: {name} is {optimizer.text}; adjustable goes around the whole optimizer, once")
    return optimizer


def wrap_split(
    optimizer: Optimizer, wrap: Callable[[Optimizer], Optimizer]
) -> Callable[[PyTree, Sequence[Sequence[int]]], list[Optimizer]] | None:
    """Return a function that splits `optimizer` and wraps each of the results; None if it cannot be split."""
    split = optimizer.split
    return None if split is None else lambda params, parts: [wrap(part) for part in split(params, parts)]


def require_splittable(
    function: str, optimizer: Optimizer
) -> Callable[[PyTree, Sequence[Sequence[int]]], list[Optimizer]]:
    """Return the `split` of an optimizer. Raises a ComposeError if it cannot update some parameters alone."""
    if optimizer.split is None:
        raise ComposeError(
            f"{function}: {optimizer.text} cannot update some parameters without the others (its Optimizer.split is "
            "None); use an optimizer of ftrain.optim, or pass split= to your own Optimizer"
        )
    return optimizer.split


def param_groups(
    function: str, optimizer: Optimizer, params: PyTree, opt_state: PyTree, parts: Sequence[Sequence[int]]
) -> Iterator[ParamGroup]:
    """Yield the groups of parameters, each with its part of the optimizer state.

    `parts` are the indices of the leaves of `params` in each group. Raises a ComposeError that names `function` if the
    optimizer has no `split`, two leaves have one name, or a group has state that the whole state does not have.
    """
    split = require_splittable(function, optimizer)
    param_names, param_leaves = tree.leaf_names(params), tree.leaves(params)
    state_names = _names_of_state(opt_state, param_names)
    require_unique(function, "parameters", param_names)
    require_unique(function, "leaves of the optimizer's state", state_names)
    index_of = {name: index for index, name in enumerate(state_names)}
    for part, group_optimizer in zip(parts, split(params, parts), strict=True):
        leaves = {param_names[index]: param_leaves[index] for index in part}
        # Only for the names of its leaves, so that no active mode may capture or count the operations.
        with _torch.without_modes():
            state = group_optimizer.init({name: _torch.on_meta(leaf) for name, leaf in leaves.items()})
        names = _names_of_state(state, param_names)
        if others := [name for name in names if name not in index_of]:
            raise ComposeError(
                f"{function}: the state of {group_optimizer.text} for {', '.join(leaves)} has the leaf {others[0]}, "
                f"which the state of {optimizer.text} does not have; its Optimizer.split must keep the names of leaves"
            )
        state_indices = [index_of[name] for name in names]
        _, spec = tree.flatten(state)
        yield ParamGroup(group_optimizer, list(leaves), list(part), state_indices, spec)


def _names_of_state(opt_state: PyTree, param_names: Sequence[str]) -> list[str]:
    """Return the names of the leaves of a state.

    If the parameters are one tensor, its name is empty. In a group it is in a dict, under this name, and the names in
    the state of the group then have an empty part, which is removed.
    """
    names = tree.leaf_names(opt_state)
    if list(param_names) != [""]:
        return names
    return [".".join(filter(None, name.split("."))) for name in names]


def require_unique(function: str, owners: str, names: Sequence[str]) -> None:
    """Raises a ComposeError that names `function` if two of the `owners`, such as "parameters", have the same name."""
    if len(set(names)) < len(names):
        name = next(name for name, count in Counter(names).items() if count > 1)
        raise ComposeError(f"{function}: two {owners} are called {name}; rename one: they are told apart by name")


def by_size(leaves: Sequence[Tensor], max_bytes: int) -> list[list[int]]:
    """Return the indices of leaves in groups, in their order: a group has at most `max_bytes`, or is a single leaf.

    >>> import torch
    >>> by_size([torch.zeros(n) for n in (1, 1, 5, 1)], 8)
    [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    size = 0
    for index, leaf in enumerate(leaves):
        if not groups or size + leaf.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += leaf.nbytes
    return groups
