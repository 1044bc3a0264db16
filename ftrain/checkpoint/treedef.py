"""The structure of a tree as JSON: containers, keys, and leaves that are not tensors, all exact."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ftrain._torch.dtensor import is_dtensor, local_part
from ftrain.checkpoint.blocks import has_many_ranks
from ftrain.checkpoint.layout import DTYPES
from ftrain.errors import MAX_LINES, CheckpointError, StructureError, first_lines
from ftrain.tree import dtype_name
from ftrain.tree.wrapped_tensors import parts_of
from ftrain.types import NAMESPACE, TREE_CLASSES, PyTree, tree_tag

Json: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]

CONTAINERS = {"dict": dict, "OrderedDict": OrderedDict, "list": list, "tuple": tuple}
KEYS = str, int, bool
NAMED_TUPLE = "namedtuple "
"""Prefix of the tag of a named tuple; no tag of a class in `TREE_CLASSES` has a space."""
WRAPPER = "tensor "
"""Prefix of the tag of a tensor that is made of inner tensors, such as a quantised weight of torchao."""
OTHER_CLASS = "class "
"""Prefix of the tag of another class that optree takes for a container, such as one of `optree.dataclasses`."""
MALFORMED = ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError
"""Errors that the functions here may raise for JSON that is not a saved tree."""
VERSION_1_TAGS = {"ftrain.types.TrainState": "TrainState", "ftrain.types.Mean": "Mean"}
"""Tags of manifests of version 1, which held the module of each class."""


class Leaf(NamedTuple):
    """A tensor of a tree, and its path."""

    path: Path
    value: Tensor


class FlatTree(NamedTuple):
    """A tree as JSON, and its tensors by their numbers in the JSON."""

    treedef: Json
    leaves: list[Leaf]

    def items_by_path(self) -> dict[Path, Any]:
        """Return the `Container`, tensor or other leaf at each path."""
        return items_by_path(self.treedef, [leaf.value for leaf in self.leaves])


class Container(NamedTuple):
    """A node of a tree that is not a leaf: the tag of its type, which is saved as ``kind``."""

    kind: str


def flatten(tree: PyTree) -> FlatTree:
    """Split a tree into its structure as JSON and its tensors.

    Raises a CheckpointError that names the leaves, keys and containers that JSON cannot hold exactly.
    """
    flattener = _Flattener()
    treedef = flattener.node((), tree)
    if flattener.problems:
        problems = first_lines(flattener.problems, MAX_LINES)
        raise CheckpointError(f"save: the tree cannot be saved exactly:{problems}")
    return FlatTree(treedef, flattener.leaves)


class _Flattener:
    """Visits a tree once, and collects its tensors and the problems that prevent saving it."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.problems: list[str] = []

    def node(self, path: Path, tree: Any) -> Json:
        """Return the JSON of a tree at a path."""
        if tree is None:
            return None
        if isinstance(tree, Tensor):
            inner = parts_of(tree)
            if inner:
                return self.container(path, f"{WRAPPER}{type(tree).__name__}", list(inner), list(inner.values()))
            return {"tensor": self.number(path, tree)}
        if type(tree) in (dict, OrderedDict):
            # In the order of insertion; optree would sort the keys.
            return self.container(path, type(tree).__name__, list(tree), list(tree.values()))
        if optree.tree_is_leaf(tree, namespace=NAMESPACE):
            return self.scalar(path, tree)
        return self.registered(path, tree)

    def number(self, path: Path, tensor: Tensor) -> int:
        """Return the number of a tensor; tied tensors, the same view of the same memory, have the same number."""
        tensor = tensor if has_many_ranks(tensor) else local_part(tensor)
        problem = _why_not_savable(tensor)
        if problem:
            self.problems.append(f"{dotted(path)}: {problem}")
            return 0
        next_number = len(self.leaves)
        identity: tuple[Any, ...] = (next_number,)
        # Empty tensors have no memory to compare. Divided tensors are never tied: a block may be empty on one rank and
        # not on another, and the numbers must be the same on all ranks.
        if tensor.numel() and not has_many_ranks(tensor):
            view = tensor.dtype, tensor.is_conj(), tensor.is_neg(), tuple(tensor.shape), tensor.stride()
            identity = tensor.device, tensor.data_ptr(), *view
        number = self._numbers.setdefault(identity, next_number)
        if number == next_number:
            self.leaves.append(Leaf(path, tensor))
        return number

    def registered(self, path: Path, tree: Any) -> Json:
        """Return the JSON of a container that optree knows, other than a dict."""
        static: Any
        children, static, entries, _ = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
        kind = type(tree)
        if kind in (list, tuple):
            return self.container(path, kind.__name__, range(len(tree)), children)
        if optree.is_namedtuple(tree):
            return self.container(path, f"{NAMED_TUPLE}{kind.__name__}", entries, children)
        tag = tree_tag(kind)
        if tag not in TREE_CLASSES:
            return self.container(path, f"{OTHER_CLASS}{kind.__name__}", entries, children)
        node = self.container(path, tag, entries, children)
        return {**node, "static": [self.scalar(path, value) for value in static]} if static else node

    def container(self, path: Path, kind: str, keys: Sequence[Any], children: Sequence[Any]) -> Json:
        """Return the JSON of a container with the tag `kind`, after visiting its children."""
        for key in keys:
            if type(key) not in KEYS:
                self.problems.append(f"{dotted(path)}: the key {key!r} is not a str, int or bool")
        return {
            "kind": kind,
            "keys": list(keys),
            "nodes": [self.node((*path, key), child) for key, child in zip(keys, children, strict=True)],
        }

    def scalar(self, path: Path, value: Any) -> Json:
        """Return the JSON of a leaf that is not a tensor."""
        try:
            return encode(value)
        except CheckpointError:
            needed = "a tensor, bool, int, float, complex, str or bytes"
            if isinstance(value, torch.nn.Module):
                needed = "its state_dict()"
            text = " ".join(repr(value).split())  # On one line.
            self.problems.append(f"{dotted(path)}: {text:.60} is a {class_name(type(value))}; needs {needed}")
            return None


def _why_not_savable(tensor: Tensor) -> str:
    """Return why a tensor cannot be saved; "" if it can."""
    if is_dtensor(tensor):
        # Exactly these classes: torch's subclasses order the blocks differently.
        for placement in tensor.placements:
            if type(placement).__name__ not in ("Shard", "Replicate"):
                return f"a DTensor of placement {placement}; needs Shard or Replicate"
    elif type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"a {class_name(type(tensor))}; needs a plain tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}; needs a dense one"
    if tensor.is_meta:
        return "on the device meta, without values"
    name = dtype_name(tensor.dtype)
    return "" if name in DTYPES else f"{name}, a dtype that cannot be saved"


def unflatten(treedef: Json, tensors: Mapping[int, Tensor]) -> PyTree:
    """Return a tree from its structure as JSON, which `items_by_path` has checked, and its tensors by number.

    Raises a CheckpointError for containers that can only be loaded with ``like=``: named tuples, quantised tensors, and
    classes that are not in `TREE_CLASSES`.
    """
    if treedef is None:
        return None
    if not _is_container(treedef):
        return _parse_leaf(treedef, tensors)
    kind, keys, nodes, static = _parse_container(treedef)
    children = [unflatten(node, tensors) for node in nodes]
    if kind in ("dict", "OrderedDict"):
        return CONTAINERS[kind](zip(keys, children, strict=True))
    if kind in CONTAINERS:
        return CONTAINERS[kind](children)
    restore = TREE_CLASSES.get(kind)
    if restore is None:
        raise CheckpointError(f"load: the tree holds a {kind}, which can only be loaded with like=")
    try:
        return restore(dict(zip(keys, children, strict=True)), static)
    except (StructureError, TypeError) as error:
        raise CheckpointError(f"load: the tree in the manifest has a malformed {kind}: {error}") from None


def require_loadable(function: str, name: str, tree: PyTree) -> None:
    """Check that `unflatten` can make a tree of this name again, which has no ``like=``.

    Raises a CheckpointError in the name of `function` if it cannot.
    """
    for kind in _kinds(flatten({name: tree}).treedef):
        if kind not in CONTAINERS and kind not in TREE_CLASSES:
            raise CheckpointError(
                f"{function}: {name} holds a {kind}, which can be saved, but not loaded again; use dicts, lists and "
                "tuples, such as list(deque)"
            )


def _kinds(treedef: Json) -> Iterator[str]:
    """Yield the tags of all containers of a tree."""
    if _is_container(treedef):
        kind, _, nodes, _ = _parse_container(treedef)
        yield kind
        for node in nodes:
            yield from _kinds(node)


def items_by_path(treedef: Json, tensors: Sequence[Any]) -> dict[Path, Any]:
    """Return the item at each path of a saved tree: a `Container`, one of `tensors`, or another leaf.

    Raises a CheckpointError, or one of `MALFORMED`, when the JSON is not that of a tree.
    """
    items: dict[Path, Any] = {}

    def visit(path: Path, node: Json) -> None:
        if node is None:
            items[path] = Container("None")
        elif _is_container(node):
            kind, keys, nodes, _ = _parse_container(node)
            items[path] = Container(kind)
            for key, child in zip(keys, nodes, strict=True):
                visit((*path, key), child)
        else:
            items[path] = _parse_leaf(node, tensors)

    visit((), treedef)
    return items


def _is_container(node: Json) -> bool:
    return isinstance(node, dict) and "kind" in node


def _parse_container(node: dict[str, Any]) -> tuple[str, list[Any], list[Any], list[Any]]:
    """Return the tag, the keys, the nodes and the static values of a container in JSON.

    Raises a CheckpointError, or one of `MALFORMED`, if the JSON is not one that was saved.
    """
    kind, keys, nodes = VERSION_1_TAGS.get(node["kind"], node["kind"]), node["keys"], node["nodes"]
    are_keys = all(type(key) in KEYS for key in keys)
    # A set, because it compares keys as a dict does, in which True and 1 are the same key.
    are_unique = are_keys and len({*keys}) == len(keys) == len(nodes)
    are_numbers = kind not in ("list", "tuple") or keys == [*range(len(keys))]
    if not (isinstance(kind, str) and are_unique and are_numbers):
        raise CheckpointError(f"load: the tree in the manifest is malformed at a {kind!r:.60}")
    return kind, keys, nodes, [decode(value) for value in node.get("static", [])]


def _parse_leaf(node: Json, tensors: Sequence[Any] | Mapping[int, Any]) -> Any:
    """Return one of `tensors`, or the value of another leaf. Raises a CheckpointError, or one of `MALFORMED`."""
    if not isinstance(node, dict) or node.keys() != {"tensor"}:
        return decode(node)
    number = node["tensor"]
    if type(number) is not int or number < 0:
        raise CheckpointError(f"load: the tree in the manifest has a tensor numbered {number!r:.60}")
    return tensors[number]


def encode(value: Any) -> Json:
    """Return a bool, int, float, complex, str or bytes as JSON that holds it exactly.

    Raises a CheckpointError for another class, also for a subclass of these.

    >>> encode(0.1), encode(3), encode("x")
    ({'float': '0x1.999999999999ap-4'}, 3, 'x')
    """
    kind = type(value)
    if kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    raise CheckpointError(f"save: {value!r:.60} is a {class_name(kind)}")


def decode(node: Json) -> Any:
    """Return the value that `encode` has encoded. Raises a CheckpointError, or one of `MALFORMED`, for other JSON."""
    if type(node) in (bool, int, str):
        return node
    ((kind, value),) = node.items()
    if kind == "float":
        return float.fromhex(value)
    if kind == "complex":
        real, imaginary = map(float.fromhex, value)
        return complex(real, imaginary)
    if kind == "bytes":
        return bytes.fromhex(value)
    raise CheckpointError(f"load: the tree in the manifest has a malformed leaf: {node!r:.60}")


def children(treedef: Json) -> dict[Any, Json]:
    """Return the children of a container by key. Raises a CheckpointError for a leaf."""
    if not _is_container(treedef):
        raise CheckpointError("load: the manifest has a leaf where a container is expected")
    _, keys, nodes, _ = _parse_container(treedef)
    return dict(zip(keys, nodes, strict=True))


def class_name(kind: type) -> str:
    """Return the name of a class with its module, for messages."""
    return f"{kind.__module__}.{kind.__qualname__}"


def dotted(path: Path) -> str:
    """Return a path written with dots.

    >>> dotted(("params", 0, "w")), dotted(())
    ('params.0.w', 'the tree')
    """
    return ".".join(map(str, path)) or "the tree"


def printable(text: str) -> str:
    r"""Return a text with its unprintable characters escaped, so that it is safe to print on any terminal.

    >>> print(printable("a\x1b[2J"), printable("b\udcff"))
    a\x1b[2J b\udcff
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
