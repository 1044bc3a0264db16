"""Different optimizers, or the same with other constants, for different parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import optree
from torch import Tensor

from ftrain import random, tree
from ftrain.errors import OptionError
from ftrain.optim.grouping import columns, require_alike
from ftrain.optim.nested import require_optimizer
from ftrain.tree.fast_flatten import Flattener
from ftrain.tree.guards import Guard
from ftrain.tree.name_patterns import Mask, as_select, near, require_matches
from ftrain.types import RNG, Hyper, Optimizer, PyTree

SEPARATOR = "/"

LabelFn: TypeAlias = Callable[[str, Tensor], str]
"""``(name, leaf) -> label``, with names as in `ftrain.tree.leaf_names`."""


def partition(optimizers: Mapping[str, Optimizer], label_fn: LabelFn | Mapping[str, Mask]) -> Optimizer:
    """Give every parameter to the optimizer of its label.

    The state is ``{label: state of that optimizer}``, in which the parameters go by their names;
    schedules are called ``label/name``.

    Args:
        optimizers: label -> optimizer.
        label_fn: ``(name, leaf) -> label``; or label -> patterns of names or function ``(name, leaf) -> bool``, in
            which one label may be left out, for the rest.

    Raises:
        ComposeError: for what is no optimizer, or is `adjustable`, which goes around all of it.
        OptionError: for labels without an optimizer; and at `init`, for a pattern that matches nothing, a parameter
            with two labels or none, two parameters of one name, or an optimizer without parameters.

    >>> import ftrain as ft
    >>> parts = {"matrices": ft.optim.muon(0.02), "rest": ft.optim.adamw(3e-4)}
    >>> optimizer = ft.optim.partition(parts, {"matrices": ["*.weight"]})
    """
    for label, optimizer in optimizers.items():
        require_optimizer("partition", label, optimizer)
    label_of = label_fn if callable(label_fn) else _Masks(label_fn, optimizers)
    split = _Split(optimizers, label_of)
    schedules = {
        f"{label}{SEPARATOR}{name}": schedule
        for label, optimizer in optimizers.items()
        for name, schedule in optimizer.schedules.items()
    }

    def init(params: PyTree) -> PyTree:
        if isinstance(label_of, _Masks):
            label_of.require(params)
        parts = split(params)
        return {label: optimizers[label].init(parts[label][0]) for label in optimizers}

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        moved: dict[str, Tensor] = {}
        state = {}
        for index, (label, (leaves, gradients)) in enumerate(split(params, grads).items()):
            own = _hyper_of(label, index, optimizers[label], hyper)
            new, state[label] = optimizers[label].update(gradients, opt_state[label], leaves, own, donate=donate)
            moved.update(new)
        return split.join(moved), state

    def apart(params: PyTree, parts: Sequence[Sequence[int]]) -> list[Optimizer]:
        leaves = {label: found for label, (found,) in split(params).items()}
        some = _apart(optimizers, leaves, tree.leaf_names(params), parts)
        return [dataclasses.replace(whole, init=each.init, update=each.update) for each in some]

    text = ", ".join(f"{label}: {optimizer.text}" for label, optimizer in optimizers.items())
    needs_rng = any(optimizer.needs_rng for optimizer in optimizers.values())
    whole = Optimizer(init, update, schedules, f"partition({text})", needs_rng)
    able = all(optimizer.apart is not None for optimizer in optimizers.values())
    return dataclasses.replace(whole, apart=apart if able else None)


def _hyper_of(label: str, index: int, optimizer: Optimizer, hyper: Hyper) -> dict[str, Any]:
    """What the optimizer of a label gets, `index` being the place of the label among all."""
    own = {name: hyper[f"{label}{SEPARATOR}{name}"] for name in optimizer.schedules}
    return {**own, RNG: random.fold_in(hyper[RNG], index)} if optimizer.needs_rng else own


class _Some(NamedTuple):
    """Of one label, some leaves."""

    label: str
    rank: int
    names: list[str]
    optimizer: Optimizer

    def of(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: leaves[name] for name in self.names}


class _Labels:
    """The optimizers of some leaves of some labels."""

    def __init__(self) -> None:
        self.found: list[_Some] = []

    def init(self, params: PyTree) -> PyTree:
        return {some.label: some.optimizer.init(some.of(params)) for some in self.found}

    def update(
        self, grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        moved: dict[str, Tensor] = {}
        state = {}
        for some in self.found:
            own = _hyper_of(some.label, some.rank, some.optimizer, hyper)
            given = some.of(grads), opt_state[some.label], some.of(params), own
            new, state[some.label] = some.optimizer.update(*given, donate=donate)
            moved.update(new)
        return moved, state


def _apart(
    optimizers: Mapping[str, Optimizer],
    leaves: Mapping[str, dict[str, Tensor]],
    names: list[str],
    parts: Sequence[Sequence[int]],
) -> list[_Labels]:
    """Return for each part the optimizers of its leaves, with the names that these have in the whole tree."""
    made = [_Labels() for _ in parts]
    for index, (label, own) in enumerate(leaves.items()):
        places = {name: place for place, name in enumerate(tree.leaf_names(own))}
        inside = [[names[place] for place in part if names[place] in own] for part in parts]
        wanted = [number for number, found in enumerate(inside) if found]
        split = optimizers[label].apart
        cut = split(own, [[places[name] for name in inside[number]] for number in wanted]) if split else []
        for number, optimizer in zip(wanted, cut, strict=True):
            made[number].found.append(_Some(label, index, inside[number], optimizer))
    return made


class _Masks:
    """The label of a parameter, from a mask for each label; at most one label is without, and takes the rest."""

    def __init__(self, masks: Mapping[str, Mask], optimizers: Mapping[str, Optimizer]) -> None:
        if not isinstance(masks, Mapping):
            raise OptionError(f"partition: label_fn is {masks!r}; needs (name, leaf) -> label, or label -> patterns")
        unknown = [label for label in masks if label not in optimizers]
        rest = [label for label in optimizers if label not in masks]
        if unknown:
            raise OptionError(
                f"partition: there is no optimizer for {', '.join(unknown)}; there are {list(optimizers)}"
            )
        if len(rest) > 1:
            raise OptionError(f"partition: {', '.join(rest)} have no patterns; one label at most can take the rest")
        self._selects = {label: as_select(f"partition: {label}", mask) for label, mask in masks.items()}
        self._rest = rest[0] if rest else None

    def require(self, params: PyTree) -> None:
        """Check that each pattern matches a parameter."""
        for select in self._selects.values():
            require_matches(select, params)

    def __call__(self, name: str, leaf: Tensor) -> str:
        """Return the label of a parameter."""
        found = [label for label, select in self._selects.items() if select(name, leaf)]
        if len(found) > 1:
            raise OptionError(f"partition: {name} has the labels {' and '.join(found)}; make their patterns disjoint")
        if not found and self._rest is None:
            raise OptionError(
                f"partition: {name} has no label; add a pattern, or leave one label out, which then takes the rest"
            )
        return found[0] if found else str(self._rest)


class _Split:
    """Cuts trees into those of each label, and remembers how, since the next tree is most often like the last."""

    def __init__(self, optimizers: Mapping[str, Optimizer], label_of: LabelFn) -> None:
        self._optimizers, self._label_of = optimizers, label_of
        self._flatten = Flattener()
        self._last: tuple[optree.PyTreeSpec, Guard] | None = None
        self._names: list[str] = []
        self._places: dict[str, list[int]] = {}

    def __call__(self, params: PyTree, *others: PyTree) -> dict[str, list[dict[str, Any]]]:
        """Return for each label the leaves of each tree, by the names of the parameters."""
        parts, spec = columns(self._flatten, params, *others)
        if self._last is None or self._last[0] is not spec or not self._last[1](parts[0]):
            self._spec = require_alike(spec)
            self._names = tree.leaf_names(params)
            self._places = self._assign(parts[0])
            self._last = spec, Guard(parts[0])
        names = self._names
        return {
            label: [{names[place]: column[place] for place in places} for column in parts]
            for label, places in self._places.items()
        }

    def join(self, leaves: Mapping[str, Tensor]) -> PyTree:
        """Return the tree like that of the last parameters whose leaves have these names."""
        return tree.unflatten(self._spec, [leaves[name] for name in self._names])

    def _assign(self, leaves: list[Tensor]) -> dict[str, list[int]]:
        names = self._names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise OptionError(f"partition: two parameters are called {twice}; rename one, for labels go by name")
        places: dict[str, list[int]] = {label: [] for label in self._optimizers}
        for place, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            label = self._label_of(name, leaf)
            if label not in places:
                known = near(str(label), list(places))
                raise OptionError(f"partition: label_fn gave {name} the label {label!r}; the optimizers are {known}")
            places[label].append(place)
        unused = [label for label, found in places.items() if not found]
        if unused and names:
            others = ", ".join(label for label in places if label not in unused)
            raise OptionError(f"partition: no parameter has the label {', '.join(unused)}; all have {others}")
        return places
