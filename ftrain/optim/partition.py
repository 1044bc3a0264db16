"""Different optimizers, or the same with other constants, for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import optree
from torch import Tensor

from ftrain import random, tree
from ftrain.errors import OptionError
from ftrain.optim.partial_update import require_optimizer, require_splittable, require_unique
from ftrain.optim.structure_cache import StructureCache, common_spec
from ftrain.tree.name_patterns import Mask, Select, as_select, near, require_matches, require_of_leaf
from ftrain.types import RNG, Hyper, Optimizer, PyTree

SEPARATOR = "/"

LabelFn: TypeAlias = Callable[[str, Tensor], str]
"""``(name, leaf) -> label``, with names as in `ftrain.tree.leaf_names`."""


def partition(optimizers: Mapping[str, Optimizer], label_fn: LabelFn | Mapping[str, Mask]) -> Optimizer:
    """Give every parameter to the optimizer of its label.

    The state is ``{label: state of that optimizer}``, in which parameters have their names;
    schedules are called ``label/name``.

    Args:
        optimizers: label -> optimizer.
        label_fn: ``(name, leaf) -> label``; or label -> patterns of names or function ``(name, leaf) -> bool``, where
            one label may be left out: it takes the rest.

    Raises:
        ComposeError: a value is not an optimizer, or is `adjustable`, which must be the outermost; at `init`: two
            parameters have one name.
        OptionError: `optimizers` is no mapping, or a label has no optimizer; at `init`: a pattern matches nothing, a
            parameter has two labels or none, or an optimizer has no parameters.

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
    schedules = {
        f"{label}{SEPARATOR}{name}": schedule
        for label, optimizer in optimizers.items()
        for name, schedule in optimizer.schedules.items()
    }

    def init(params: PyTree) -> PyTree:
        for select in selects.values():
            require_matches(select, params)
        (_, names, parts), (leaves,) = labelled(params)
        return _init(parts, dict(zip(names, leaves, strict=True)))

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        (spec, names, parts), columns = labelled(params, grads)
        leaves, gradients = (dict(zip(names, column, strict=True)) for column in columns)
        new, state = _update(parts, gradients, opt_state, leaves, hyper, donate=donate)
        return tree.unflatten(spec, [new[name] for name in names]), state

    def split(params: PyTree, groups: Sequence[Sequence[int]]) -> list[Optimizer]:
        (_, names, parts), (leaves,) = labelled(params)
        named = dict(zip(names, leaves, strict=True))
        split = [part.split(named, [[names[index] for index in group] for group in groups]) for part in parts]
        chosen = [[each[number] for each in split if number in each] for number in range(len(groups))]
        return [_of_parts(whole, each) for each in chosen]

    text = ", ".join(f"{label}: {optimizer.text}" for label, optimizer in optimizers.items())
    needs_rng = any(optimizer.needs_rng for optimizer in optimizers.values())
    by_element = all(optimizer.by_element for optimizer in optimizers.values())
    options = {f"{label}/{name}": value for label, each in optimizers.items() for name, value in each.options.items()}
    whole = Optimizer(init, update, schedules, f"partition({text})", needs_rng, by_element=by_element, options=options)
    able = all(optimizer.split is not None for optimizer in optimizers.values())
    return replace(whole, split=split if able else None)


class _Part(NamedTuple):
    """Some leaves of one label, and their optimizer; `rank` is the index of the label among all."""

    label: str
    rank: int
    names: list[str]
    optimizer: Optimizer

    def of(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: leaves[name] for name in self.names}

    def hyper(self, hyper: Hyper) -> dict[str, Any]:
        """Return the scheduled values and the key for the optimizer of the label."""
        values = {name: hyper[f"{self.label}{SEPARATOR}{name}"] for name in self.optimizer.schedules}
        return {**values, RNG: random.fold_in(hyper[RNG], self.rank)} if self.optimizer.needs_rng else values

    def split(self, leaves: Mapping[str, Tensor], groups: list[list[str]]) -> dict[int, _Part]:
        """Return number of the group -> its leaves of this label, for the groups that have such leaves."""
        leaves = self.of(leaves)
        index_of = {name: index for index, name in enumerate(tree.leaf_names(leaves))}
        names = {number: [name for name in group if name in leaves] for number, group in enumerate(groups)}
        names = {number: group for number, group in names.items() if group}
        indices = [[index_of[name] for name in group] for group in names.values()]
        optimizers = require_splittable("partition", self.optimizer)(leaves, indices)
        split = zip(names.items(), optimizers, strict=True)
        return {number: self._replace(names=group, optimizer=optimizer) for (number, group), optimizer in split}


def _of_parts(whole: Optimizer, parts: Sequence[_Part]) -> Optimizer:
    """Return the optimizer of some leaves, from the parts for each of their labels."""
    by_element = all(part.optimizer.by_element for part in parts)
    init, update = partial(_init, parts), partial(_update, parts)
    return replace(whole, init=init, update=update, split=None, by_element=by_element)


def _init(parts: Sequence[_Part], params: PyTree) -> PyTree:
    return {part.label: part.optimizer.init(part.of(params)) for part in parts}


def _update(
    parts: Sequence[_Part], grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
) -> tuple[PyTree, PyTree]:
    new_params: dict[str, Tensor] = {}
    new_state = {}
    for part in parts:
        trees = part.of(grads), opt_state[part.label], part.of(params), part.hyper(hyper)
        leaves, new_state[part.label] = part.optimizer.update(*trees, donate=donate)
        new_params.update(leaves)
    return new_params, new_state


def _by_masks(masks: Mapping[str, Mask], known: list[str]) -> tuple[dict[str, Select], LabelFn]:
    """Return the masks as functions, and the label of a parameter; one label may have no mask, and takes the rest."""
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
    for name, leaf in zip(names, leaves, strict=True):
        label = label_of(name, leaf)
        if label not in names_of:
            known = near(str(label), list(names_of))
            raise OptionError(f"partition: label_fn gave {name} the label {label!r}; the optimizers are {known}")
        names_of[label].append(name)
    unused = [label for label, labelled in names_of.items() if not labelled]
    if unused and names:
        others = ", ".join(label for label in names_of if label not in unused)
        raise OptionError(f"partition: no parameter has the label {', '.join(unused)}; all have {others}")
    parts = [_Part(label, i, names_of[label], optimizer) for i, (label, optimizer) in enumerate(optimizers.items())]
    return spec, names, parts
