"""Flatten trees of a known structure, several times faster than `ftrain.tree.flatten`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, TypeAlias

import optree
from torch import Tensor, nn

from ftrain import tree
from ftrain.types import PyTree, TrainState

Read: TypeAlias = Callable[[PyTree, list[Any]], bool]
"""``(tree, leaves) -> bool``: append the leaves of the tree to a list, and return whether it has the structure.

If it does not, the list has some leaves all the same; or a KeyError is raised.
"""

TENSORS = {Tensor, nn.Parameter}
"""Classes that cannot be registered as nodes of a tree, so that an instance is always a leaf."""


def reader(spec: optree.PyTreeSpec) -> Callable[[PyTree], list[Any] | None]:
    """Return a function that lists the leaves of a tree in the order of `ftrain.tree.flatten`.

    The function returns None for a tree of another structure. It treats any object in the place of a leaf as a leaf,
    so the caller must check the types of the leaves.

    >>> _, spec = tree.flatten({"b": 1, "a": (2, 3)})
    >>> reader(spec)({"a": (4, 5), "b": 6}), reader(spec)({"a": (4, 5)})
    ([4, 5, 6], None)
    """
    read = _reader_of(spec)

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
        # The reader of the last structure, and that structure. One tuple, so that a thread never sees the reader of one
        # structure with the spec of another.
        self._last: tuple[Read, optree.PyTreeSpec] | None = None

    def __call__(self, node: PyTree) -> tuple[list[Any], optree.PyTreeSpec]:
        """Return the leaves of a tree and its structure.

        The structure is the same object as in the last call if the structures are equal.
        """
        if self._last is not None:
            read, spec = self._last
            leaves: list[Any] = []
            try:
                if read(node, leaves) and TENSORS.issuperset(map(type, leaves)):
                    return leaves, spec
            except KeyError:
                pass
        leaves, new_spec = tree.flatten(node)
        if self._last is None or self._last[1] != new_spec:
            self._last = _reader_of(new_spec), new_spec
        return leaves, self._last[1]


def _reader_of(spec: optree.PyTreeSpec) -> Read:
    if spec.type in (dict, list, tuple, TrainState):
        return _container_reader(spec)
    return _general_reader(spec)


def _flat_dict_getter(spec: optree.PyTreeSpec) -> Callable[[Any], Iterable[Any]] | None:
    """Return a function that returns the leaves of a dict of leaves; None for another structure.

    None also for a dict of one leaf, because `itemgetter` with one key returns the leaf itself, not a tuple.
    """
    is_flat_dict = spec.type is dict and spec.num_nodes == 1 + spec.num_leaves
    if not is_flat_dict or spec.num_leaves == 1:
        return None
    return itemgetter(*spec.entries()) if spec.num_leaves else tuple


def _container_reader(spec: optree.PyTreeSpec) -> Read:
    """Return the reader of a dict, list, tuple or state.

    It reads leaves, dicts of leaves and None without a call of another reader: it runs several times per step.
    """
    node_type: Any = spec.type
    count = spec.num_children
    children = []
    for entry, child in zip(spec.entries(), spec.children(), strict=True):
        is_leaf_or_none = child.type in (None, type(None))
        read_child = None if is_leaf_or_none else _reader_of(child)
        children.append((entry, child.num_leaves, _flat_dict_getter(child), read_child))

    get_leaves = _flat_dict_getter(spec)

    def read(node: Any, leaves: list[Any]) -> bool:
        if type(node) is not node_type:
            return False
        if node_type is TrainState:
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


def _general_reader(spec: optree.PyTreeSpec) -> Read:
    """Return a reader that calls `tree.flatten` and compares structures, which include static values."""

    def read(node: Any, leaves: list[Any]) -> bool:
        node_leaves, structure = tree.flatten(node)
        leaves.extend(node_leaves)
        return structure == spec

    return read
