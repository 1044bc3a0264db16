"""Flatten trees of one known structure, several times faster than `ftrain.tree.flatten`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, TypeAlias

import optree
from torch import Tensor, nn

from ftrain import tree
from ftrain.types import PyTree, TrainState

Read: TypeAlias = Callable[[PyTree, list[Any]], bool]
"""``(tree, leaves) -> bool``: append the leaves of the tree, and return whether it has the structure."""

TENSORS = {Tensor, nn.Parameter}
"""Classes that are certainly leaves."""


def reader(spec: optree.PyTreeSpec) -> Callable[[PyTree], list[Any] | None]:
    """Return a function that lists the leaves of a tree in the order of `ftrain.tree.flatten`.

    The function returns None for a tree of another structure. It treats any object in the place of a leaf as a leaf,
    so the caller must check the types of the leaves.

    >>> _, spec = tree.flatten({"b": 1, "a": (2, 3)})
    >>> reader(spec)({"a": (4, 5), "b": 6}), reader(spec)({"a": (4, 5)})
    ([4, 5, 6], None)
    """
    read = _read(spec)

    def read_leaves(node: PyTree) -> list[Any] | None:
        leaves: list[Any] = []
        try:
            return leaves if read(node, leaves) else None
        except KeyError:
            return None

    return read_leaves


class Flattener:
    """`ftrain.tree.flatten` for a sequence of trees that mostly have the same structure."""

    def __init__(self) -> None:
        # One tuple, so that threads never see the reader of one structure with the spec of another.
        self._last: tuple[Read, optree.PyTreeSpec] | None = None

    def __call__(self, node: PyTree) -> tuple[list[Any], optree.PyTreeSpec]:
        """Return the leaves of a tree and its structure; the same object for trees of the same structure in turn."""
        if self._last is not None:
            (read, spec), leaves = self._last, list[Any]()
            try:
                if read(node, leaves) and TENSORS.issuperset(map(type, leaves)):
                    return leaves, spec
            except KeyError:
                pass
        leaves, new_spec = tree.flatten(node)
        if self._last is None or self._last[1] != new_spec:
            self._last = _read(new_spec), new_spec
        return leaves, self._last[1]


def _read(spec: optree.PyTreeSpec) -> Read:
    return _container(spec) if spec.type in (dict, list, tuple, TrainState) else _any(spec)


def _flat_dict(spec: optree.PyTreeSpec) -> Callable[[Any], Iterable[Any]] | None:
    """Return a function that lists the leaves of a dict of no or at least two leaves; None for another structure."""
    if spec.type is not dict or spec.num_leaves == 1 or spec.num_nodes != 1 + spec.num_leaves:
        return None
    return itemgetter(*spec.entries()) if spec.num_leaves else tuple


def _container(spec: optree.PyTreeSpec) -> Read:
    kind: Any = spec.type
    count = spec.num_children
    # Leaves, dicts of leaves and None are read without a call: this runs several times per step.
    children = [
        (entry, child.num_leaves, _flat_dict(child), None if child.type in (None, type(None)) else _read(child))
        for entry, child in zip(spec.entries(), spec.children(), strict=True)
    ]

    get_leaves = _flat_dict(spec)

    def read(node: Any, leaves: list[Any]) -> bool:
        if type(node) is not kind:
            return False
        if kind is TrainState:
            node = vars(node)
        elif len(node) != count:
            return False
        if get_leaves is not None:
            leaves += get_leaves(node)
            return True
        for entry, size, get, read_child in children:
            child = node[entry]
            if get is not None:
                if type(child) is not dict or len(child) != size:
                    return False
                leaves += get(child)
            elif read_child is None:
                if size:
                    leaves.append(child)
                elif child is not None:
                    return False
            elif not read_child(child, leaves):
                return False
        return True

    return read


def _any(spec: optree.PyTreeSpec) -> Read:
    """Flatten other nodes with `tree.flatten`, and compare structures, which include static values."""

    def read(node: Any, leaves: list[Any]) -> bool:
        flat, structure = tree.flatten(node)
        leaves.extend(flat)
        return structure == spec

    return read
