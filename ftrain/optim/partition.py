"""Use different optimizers, or one with different options, for different parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import optree
from torch import Tensor

from ftrain import random, tree
from ftrain.errors import OptionError
from ftrain.optim.partial_update import require_optimizer, require_splittable, require_unique
from ftrain.optim.structure_cache import StructureCache, common_spec
from ftrain.tree import sharding
from ftrain.tree.name_patterns import Mask, Select, as_select, near, require_matches, require_of_leaf
from ftrain.types import RNG, Hyper, Optimizer, PyTree

T = TypeVar("T")

SEPARATOR = "/"

LabelFn: TypeAlias = Callable[[str, Tensor], str]
"""``(name, leaf) -> label``, with names as in `ftrain.tree.leaf_names`."""


def partition(optimizers: Mapping[str, Optimizer], label_fn: LabelFn | Mapping[str, Mask]) -> Optimizer:
    """Return an optimizer that updates each parameter with the optimizer of its label.

    The state is ``{label: state of that optimizer}``. An optimizer gets its parameters as a dict by name. Schedules are
    called ``label/name``.

    Args:
        optimizers: label -> optimizer.
        label_fn: ``(name, leaf) -> label``; or label -> patterns of names or function ``(name, leaf) -> bool``, where
            one label may be left out: it takes the remaining parameters.

    Raises:
        ComposeError: a value is not an optimizer, or is `adjustable`, which must be the outermost; at `init`: two
            parameters have one name.
        OptionError: `optimizers` is no mapping, or a label has no optimizer; at `init`: a pattern matches nothing, a
            parameter has two labels or none, or an optimizer has no parameters. Two labels give values one name.

    >>> import ftrain as ft
    >>> parts = {"matrices": ft.optim.muon(0.02), "rest": ft.optim.adamw(3e-4)}
    >>> optimizer = ft.optim.partition(parts, {"matrices": ["*.weight"]})
    """
    if not isinstance(optimizers, Mapping):
        raise OptionError(f"partition: optimizers is {optimizers!r}; needs label -> optimizer")
    for label, optimizer in optimizers.items():
        require_optimizer("partition", label, optimizer)
    selects: dict[str, Select] = {}
    if callable(label_fn):
        label_of = require_of_leaf("partition: label_fn", label_fn, "label")
    else:
        selects, label_of = _by_masks(label_fn, list(optimizers))
    labelled = StructureCache(partial(_labelled, optimizers, label_of))
    schedules = _with_labels({label: optimizer.schedules for label, optimizer in optimizers.items()})

    def init(params: PyTree) -> PyTree:
        for select in selects.values():
            require_matches(select, params)
        (_, names, parts), (leaves,) = labelled(params)
        return _init(parts, dict(zip(names, leaves, strict=True)))

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        (spec, names, parts), columns = labelled(params, grads)
        params_by_name, grads_by_name = (dict(zip(names, column, strict=True)) for column in columns)
        new_params, new_state = _update(parts, grads_by_name, opt_state, params_by_name, hyper, donate=donate)
        return tree.unflatten(spec, [new_params[name] for name in names]), new_state

    def split(params: PyTree, groups: Sequence[Sequence[int]]) -> list[Optimizer]:
        (_, names, parts), (leaves,) = labelled(params)
        params_by_name = dict(zip(names, leaves, strict=True))
        names_of_groups = [[names[index] for index in group] for group in groups]
        split_parts = [part.split(params_by_name, names_of_groups) for part in parts]
        return [
            _join(whole, [part_of_group[number] for part_of_group in split_parts if number in part_of_group])
            for number in range(len(groups))
        ]

    text = ", ".join(f"{label}: {optimizer.text}" for label, optimizer in optimizers.items())
    needs_rng = any(optimizer.needs_rng for optimizer in optimizers.values())
    by_element = all(optimizer.by_element for optimizer in optimizers.values())
    options = _with_labels({label: optimizer.options for label, optimizer in optimizers.items()})
    whole = Optimizer(init, update, schedules, f"partition({text})", needs_rng, by_element=by_element, options=options)
    can_split = all(optimizer.split is not None for optimizer in optimizers.values())
    return replace(whole, split=split if can_split else None)


def _with_labels(values_of: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Return the values of all labels in one dict, by ``label/name``. Raises an OptionError if two have one name."""
    named = [(f"{label}{SEPARATOR}{name}", value) for label, each in values_of.items() for name, value in each.items()]
    by_name = dict(named)
    if len(by_name) < len(named):
        name = next(name for name, count in Counter(name for name, _ in named).items() if count > 1)
        raise OptionError(f"partition: two optimizers have a value called {name}; rename a label")
    return by_name


class _Part(NamedTuple):
    """Leaves of one label, by name, and their optimizer; `label_index` is that of the label among all."""

    label: str
    label_index: int
    names: list[str]
    optimizer: Optimizer

    def select(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the leaves of this part."""
        return {name: leaves[name] for name in self.names}

    def hyper(self, hyper: Hyper) -> dict[str, Any]:
        """Return the scheduled values and the key for the optimizer of the label."""
        values = {name: hyper[f"{self.label}{SEPARATOR}{name}"] for name in self.optimizer.schedules}
        return {**values, RNG: random.fold_in(hyper[RNG], self.label_index)} if self.optimizer.needs_rng else values

    def split(self, leaves: Mapping[str, Tensor], groups: list[list[str]]) -> dict[int, _Part]:
        """Return number of the group -> the leaves of this label in it, for the groups that have any."""
        leaves = self.select(leaves)
        index_of = {name: index for index, name in enumerate(tree.leaf_names(leaves))}
        names_of: dict[int, list[str]] = {}
        for number, group in enumerate(groups):
            names = [name for name in group if name in leaves]
            if names:
                names_of[number] = names
        indices = [[index_of[name] for name in names] for names in names_of.values()]
        optimizers = require_splittable("partition", self.optimizer)(leaves, indices)
        return {
            number: self._replace(names=names, optimizer=optimizer)
            for (number, names), optimizer in zip(names_of.items(), optimizers, strict=True)
        }


def _join(whole: Optimizer, parts: Sequence[_Part]) -> Optimizer:
    """Return the optimizer of the leaves of these parts, with the texts and schedules of the whole partition."""
    by_element = all(part.optimizer.by_element for part in parts)
    init, update = partial(_init, parts), partial(_update, parts)
    return replace(whole, init=init, update=update, split=None, by_element=by_element)


def _init(parts: Sequence[_Part], params: PyTree) -> PyTree:
    return {part.label: part.optimizer.init(part.select(params)) for part in parts}


def _update(
    parts: Sequence[_Part], grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
) -> tuple[PyTree, PyTree]:
    new_params: dict[str, Tensor] = {}
    new_state = {}
    for part in parts:
        part_params, new_state[part.label] = part.optimizer.update(
            part.select(grads), opt_state[part.label], part.select(params), part.hyper(hyper), donate=donate
        )
        new_params.update(part_params)
    return new_params, new_state


def _by_masks(masks: Mapping[str, Mask], known: list[str]) -> tuple[dict[str, Select], LabelFn]:
    """Return the masks as functions, and a function that returns the label of a parameter.

    One label of `known` may have no mask: it takes the remaining parameters.
    """
    if not isinstance(masks, Mapping):
        raise OptionError(f"partition: label_fn is {masks!r}; needs (name, leaf) -> label, or label -> patterns")
    unknown = [label for label in masks if label not in known]
    rest = [label for label in known if label not in masks]
    if unknown:
        raise OptionError(f"partition: there is no optimizer for {', '.join(unknown)}; there are {known}")
    if len(rest) > 1:
        raise OptionError(f"partition: {', '.join(rest)} have no patterns; one label at most can take the rest")
    selects = {label: as_select(f"partition: {label}", mask) for label, mask in masks.items()}

    def label_of(name: str, leaf: Tensor) -> str:
        labels = [label for label, select in selects.items() if select(name, leaf)] or rest
        if len(labels) > 1:
            raise OptionError(f"partition: {name} has the labels {' and '.join(labels)}; make their patterns disjoint")
        if not labels:
            raise OptionError(
                f"partition: {name} has no label; add a pattern, or leave one label out, which then takes the rest"
            )
        return labels[0]

    return selects, label_of


def _labelled(
    optimizers: Mapping[str, Optimizer],
    label_of: LabelFn,
    specs: Sequence[optree.PyTreeSpec],
    columns: list[list[Tensor]],
) -> tuple[optree.PyTreeSpec, list[str], list[_Part]]:
    """Return the structure of the parameters, the names of their leaves, and the part of each label."""
    spec, leaves = common_spec(specs), columns[0]
    names = tree.leaf_names(tree.unflatten(spec, leaves))
    require_unique("partition", "parameters", names)
    names_of: dict[str, list[str]] = {label: [] for label in optimizers}
    for name, whole in zip(names, sharding.wholes(names, leaves), strict=True):
        label = label_of(name, whole)
        if label not in names_of:
            known = near(str(label), list(names_of))
            raise OptionError(f"partition: label_fn gave {name} the label {label!r}; the optimizers are {known}")
        names_of[label].append(name)
    unused = [label for label, label_names in names_of.items() if not label_names]
    if unused and names:
        used = ", ".join(label for label in names_of if label not in unused)
        raise OptionError(f"partition: no parameter has the label {', '.join(unused)}; all have {used}")
    parts = [_Part(label, i, names_of[label], optimizer) for i, (label, optimizer) in enumerate(optimizers.items())]
    return spec, names, parts
