"""Flatten trees of one known structure, several times faster than `ftrain.tree.flatten`."""

from __future__ import annotations

from collections.abc import Callable
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

    The function returns None for a tree of another structure. It takes any object in the place of a leaf for a leaf,
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
        except (KeyError, AttributeError):
            return None

    return read_leaves


class Flattener:
    """`ftrain.tree.flatten` for a sequence of trees that mostly have the same structure."""

    def __init__(self) -> None:
        # One tuple, so that threads never see the reader of one structure with the spec of another.
        self._last: tuple[Callable[[PyTree], list[Any] | None], optree.PyTreeSpec] | None = None

    def __call__(self, node: PyTree) -> tuple[list[Any], optree.PyTreeSpec]:
        """Return the leaves of a tree and its structure; the same object for trees of the same structure in turn."""
        last = self._last
        if last is not None:
            leaves = last[0](node)
            if leaves is not None and TENSORS.issuperset(map(type, leaves)):
                return leaves, last[1]
        leaves, spec = tree.flatten(node)
        if last is not None and spec == last[1]:
            return leaves, last[1]
        self._last = reader(spec), spec
        return leaves, spec


def _read(spec: optree.PyTreeSpec) -> Read:
    if spec.is_leaf():
        return _leaf
    if spec.type is type(None):
        return _none
    children, entries = spec.children(), spec.entries()
    if spec.type in (dict, list, tuple):
        return _container(spec.type, entries, children)
    if spec.type is TrainState:
        return _state(entries, children)
    return _any(spec)


def _leaf(node: Any, leaves: list[Any]) -> bool:
    leaves.append(node)
    return True


def _none(node: Any, leaves: list[Any]) -> bool:
    return node is None


def _container(kind: type[Any], entries: list[Any], children: list[optree.PyTreeSpec]) -> Read:
    count = len(children)
    if kind is dict and count > 1 and all(child.is_leaf() for child in children):
        get = itemgetter(*entries)

        def read_flat(node: Any, leaves: list[Any]) -> bool:
            if type(node) is not dict or len(node) != count:
                return False
            leaves += get(node)
            return True

        return read_flat
    # Leaves are appended without a call: this runs several times a step.
    pairs = [(entry, None if child.is_leaf() else _read(child)) for entry, child in zip(entries, children, strict=True)]

    def read(node: Any, leaves: list[Any]) -> bool:
        if type(node) is not kind or len(node) != count:
            return False
        for entry, child in pairs:
            if child is None:
                leaves.append(node[entry])
            elif not child(node[entry], leaves):
                return False
        return True

    return read


def _state(names: list[str], children: list[optree.PyTreeSpec]) -> Read:
    pairs = [(name, _read(child)) for name, child in zip(names, children, strict=True)]

    def read(node: Any, leaves: list[Any]) -> bool:
        return type(node) is TrainState and all(child(getattr(node, name), leaves) for name, child in pairs)

    return read


def _any(spec: optree.PyTreeSpec) -> Read:
    """Flatten nodes of other classes with `tree.flatten`, and compare structures, which include static values."""

    def read(node: Any, leaves: list[Any]) -> bool:
        flat, structure = tree.flatten(node)
        leaves.extend(flat)
        return structure == spec

    return read
