"""An update a few leaves at a time: what belongs to these is given to the optimizer of them alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import optree
import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import ComposeError
from ftrain.tree.fast_flatten import Flattener
from ftrain.tree.guards import Guard
from ftrain.types import Hyper, Optimizer, PyTree


@dataclass(frozen=True)
class Share:
    """Some leaves of the parameters, the optimizer of these alone, and what of the whole state is theirs.

    Args:
        optimizer: of these leaves.
        names: of the leaves.
        places: of the leaves among those of the parameters.
        held: of each leaf of their state, its place in the state of all.
        spec: the structure of their state.
    """

    optimizer: Optimizer
    names: list[str]
    places: list[int]
    held: list[int]
    spec: optree.PyTreeSpec

    def update(
        self, grads: Sequence[Tensor], state: Sequence[Tensor], params: Sequence[Tensor], hyper: Hyper, *, donate: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the leaves after the update, and those of their state, all in the order of this record."""
        trees = dict(zip(self.names, grads, strict=True)), dict(zip(self.names, params, strict=True))
        own = tree.unflatten(self.spec, list(state))
        new, kept = self.optimizer.update(trees[0], own, trees[1], hyper, donate=donate)
        return [new[name] for name in self.names], tree.leaves(kept)


class Update:
    """One update, whose shares may come in any order, each of them once.

    Args:
        shares: of all leaves.
        params: the leaves of the parameters.
        state: those of the optimizer's state.
        specs: the structures of both.
        hyper: what the optimizer is given.
        donate: whether `params` and `state` may be written.
    """

    def __init__(
        self,
        shares: list[Share],
        params: list[Tensor],
        state: list[Tensor],
        specs: tuple[optree.PyTreeSpec, optree.PyTreeSpec],
        *,
        hyper: Hyper,
        donate: bool,
    ) -> None:
        self.shares, self._specs, self._hyper, self._donate = shares, specs, hyper, donate
        self._params, self._state = params, state
        self._new_params, self._new_state = list(params), list(state)
        counts = Counter(place for share in shares for place in share.held)
        # What several read, counts of updates say, must be the same for each of them.
        self._common = {place for place, count in counts.items() if count > 1}

    def state_of(self, share: Share) -> list[Tensor]:
        """Return the leaves of the state that a share reads and may write."""
        return [self._state[p].clone() if p in self._common else self._state[p] for p in share.held]

    def make(self, share: Share, grads: Sequence[Tensor], state: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Update the leaves of one share, and return those of its state.

        Args:
            share: which.
            grads: the gradients of its leaves.
            state: the leaves of its state, where they were brought from elsewhere; else `state_of` it.
        """
        given = self.state_of(share) if state is None else state
        leaves = [self._params[place] for place in share.places]
        params, kept = share.update(grads, given, leaves, self._hyper, donate=self._donate)
        for place, leaf in zip(share.places, params, strict=True):
            self._new_params[place] = leaf
        for place, leaf, before in zip(share.held, kept, given, strict=True):
            # What was handed on as it was given is still where it was.
            self._new_state[place] = self._state[place] if leaf is before and place not in self._common else leaf
        return kept

    def keep(self, share: Share, state: Sequence[Tensor]) -> None:
        """Say where the leaves of the state of a share are now, when `make` was given others."""
        for place, leaf in zip(share.held, state, strict=True):
            if place not in self._common:
                self._new_state[place] = leaf

    def finish(self) -> tuple[PyTree, PyTree]:
        """Return the parameters and the state after all shares."""
        if self._donate:
            for place in self._common:
                if self._new_state[place] is not self._state[place]:
                    self._new_state[place] = self._state[place].copy_(self._new_state[place])
        return tree.unflatten(self._specs[0], self._new_params), tree.unflatten(self._specs[1], self._new_state)


class Apart:
    """Cuts updates into shares, and remembers how, since the next state is most often like the last.

    Args:
        function: who asks, for messages.
        optimizer: which has an `apart`.
        group: leaves of the parameters -> parts, each of which is the indices of some.

    Raises:
        ComposeError: when the optimizer has none.
    """

    def __init__(
        self, function: str, optimizer: Optimizer, group: Callable[[Sequence[Tensor]], Sequence[Sequence[int]]]
    ) -> None:
        require_apart(function, optimizer)
        self._function, self._optimizer, self._group = function, optimizer, group
        self._flatten = Flattener()
        self._last: tuple[optree.PyTreeSpec, Guard] | None = None
        self._shares: list[Share] = []

    def begin(self, params: PyTree, opt_state: PyTree, hyper: Hyper, *, donate: bool) -> Update:
        """Return an update that is still to be made."""
        leaves, spec = self._flatten((params, opt_state))
        specs = spec.child(0), spec.child(1)
        count = specs[0].num_leaves
        mine, state = leaves[:count], leaves[count:]
        if self._last is None or self._last[0] is not spec or not self._last[1](mine):
            parts = self._group(mine)
            self._shares = list(shares(self._function, self._optimizer, params, opt_state, parts))
            self._last = spec, Guard(mine)
        return Update(self._shares, mine, state, specs, hyper=hyper, donate=donate)


def require_apart(function: str, optimizer: Optimizer) -> None:
    """Check for an optimizer that can update some leaves without the others.

    Raises:
        ComposeError: when it cannot.
    """
    if optimizer.apart is None:
        raise ComposeError(
            f"{function}: {optimizer.text} cannot update some parameters without the others (its Optimizer.apart is "
            "None); take one that can, as those of ftrain.optim do, or give your own an `apart`"
        )


def shares(
    function: str, optimizer: Optimizer, params: PyTree, opt_state: PyTree, parts: Sequence[Sequence[int]]
) -> Iterator[Share]:
    """Cut parameters and the state of their optimizer into shares.

    Args:
        function: who asks, for messages.
        optimizer: which has an `apart`.
        params: the parameters.
        opt_state: the state beside them.
        parts: for each share, the indices of its leaves.

    Raises:
        ComposeError: when the optimizer has no `apart`, two leaves have one name, or a share has leaves that the whole
            state has not.
    """
    require_apart(function, optimizer)
    names, leaves = tree.leaf_names(params), tree.leaves(params)
    kept = tree.leaf_names(opt_state)
    known = {name: place for place, name in enumerate(kept)}
    for found, what in ((names, "parameters"), (kept, "leaves of the optimizer's state")):
        if len(set(found)) < len(found):
            twice = next(name for name, count in Counter(found).items() if count > 1)
            raise ComposeError(f"{function}: two {what} are called {twice}; rename one, for updates go by name")
    made = optimizer.apart(params, parts) if optimizer.apart is not None else []
    for part, own in zip(parts, made, strict=True):
        given = {names[place]: leaves[place] for place in part}
        # Outside of whatever captures or watches this run, for only names matter.
        with _torch.without_modes():
            state = own.init({name: _hollow(leaf) for name, leaf in given.items()})
        _, spec = tree.flatten(state)
        own_names = tree.leaf_names(state)
        if not known.keys() >= set(own_names):
            other = next(name for name in own_names if name not in known)
            raise ComposeError(
                f"{function}: {own.text} of {', '.join(given)} alone keeps {other}, and the state of all has "
                f"no leaf of that name; its Optimizer.apart must name leaves as {optimizer.text} does"
            )
        yield Share(own, list(given), list(part), [known[name] for name in own_names], spec)


def _hollow(leaf: Tensor) -> Tensor:
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def by_size(leaves: Sequence[Tensor], most: int) -> list[list[int]]:
    """Group leaves, in their order, so that a group takes at most so many bytes, or is a single leaf.

    >>> by_size([torch.zeros(n) for n in (1, 1, 5, 1)], 8)
    [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    size = 0
    for index, leaf in enumerate(leaves):
        if not groups or size + leaf.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += leaf.nbytes
    return groups
