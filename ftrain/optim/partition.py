"""Different optimizers, or the same with other constants, for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ftrain import tree
from ftrain.errors import OptionError
from ftrain.optim.leaves import columns, require_alike
from ftrain.types import Hyper, Optimizer, PyTree

SEPARATOR = "/"


def partition(optimizers: Mapping[str, Optimizer], label_fn: Callable[[str, Tensor], str]) -> Optimizer:
    """Give every parameter to the optimizer of its label.

    The state is ``{label: state of that optimizer}``, in which the parameters go by their names;
    schedules are called ``label/name``.

    Args:
        optimizers: label -> optimizer.
        label_fn: ``(name, leaf) -> label``, with names as in `ftrain.tree.leaf_names`.

    Raises:
        OptionError: at `init`, for two parameters of one name, a label without an optimizer, or an optimizer
            without parameters.
    """
    schedules = {
        f"{label}{SEPARATOR}{name}": schedule
        for label, optimizer in optimizers.items()
        for name, schedule in optimizer.schedules.items()
    }

    def split(params: PyTree, *others: PyTree) -> dict[str, list[dict[str, Any]]]:
        parts, spec = columns(tree.flatten, params, *others)
        require_alike(spec)
        names = tree.leaf_names(params)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise OptionError(f"partition: two parameters are called {twice}; rename one, for labels go by name")
        labels = [label_fn(name, leaf) for name, leaf in zip(names, parts[0], strict=True)]
        _require_labels(dict(zip(names, labels, strict=True)), optimizers)
        return {
            label: [
                {name: leaf for name, leaf, has in zip(names, column, labels, strict=True) if has == label}
                for column in parts
            ]
            for label in optimizers
        }

    def init(params: PyTree) -> PyTree:
        parts = split(params)
        return {label: optimizers[label].init(parts[label][0]) for label in optimizers}

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        moved: dict[str, Tensor] = {}
        state = {}
        for label, (leaves, gradients) in split(params, grads).items():
            own = {name: hyper[f"{label}{SEPARATOR}{name}"] for name in optimizers[label].schedules}
            new, state[label] = optimizers[label].update(gradients, opt_state[label], leaves, own, donate=donate)
            moved.update(new)
        return tree.map_named(lambda name, leaf: moved[name], params), state

    text = ", ".join(f"{label}: {optimizer.text}" for label, optimizer in optimizers.items())
    return Optimizer(init, update, schedules, f"partition({text})")


def _require_labels(labels: dict[str, str], optimizers: Mapping[str, Optimizer]) -> None:
    for name, label in labels.items():
        if label not in optimizers:
            raise OptionError(
                f"partition: label_fn gave {name} the label {label!r}; the optimizers are {', '.join(optimizers)}"
            )
    unused = [label for label in optimizers if label not in labels.values()]
    if unused and labels:
        raise OptionError(
            f"partition: no parameter has the label {', '.join(unused)}; labels are {sorted(set(labels.values()))}"
        )
