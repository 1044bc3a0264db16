"""A tree as JSON, typed and exact: its containers, its keys, and its leaves that are no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ftrain.checkpoint.layout import DTYPES
from ftrain.errors import CheckpointError, StructureError
from ftrain.types import NAMESPACE, TREE_CLASSES, PyTree, TrainState, tree_tag

Json: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]

CONTAINERS = {"dict": dict, "OrderedDict": OrderedDict, "list": list, "tuple": tuple}
KEYS = str, int, bool
NAMED_TUPLE = "namedtuple "
"""Begins the tag of a named tuple; no tag of a registered class has a space."""
VERSION_1_TAGS = {"ftrain.types.TrainState": "TrainState", "ftrain.types.Mean": "Mean"}
"""Tags of manifests of version 1, which held the module of each class, and of every named tuple."""


class Leaf(NamedTuple):
    """A tensor of a tree, where it is, and where the innermost `TrainState` around it is."""

    path: Path
    value: Tensor
    owner: Path | None


class Described(NamedTuple):
    """A tree as JSON, its tensors in the order of their numbers in it, and of each path what is there."""

    skeleton: Json
    leaves: list[Leaf]
    contents: dict[Path, Any]


class Container(NamedTuple):
    """A node of a tree that is no leaf: the name of its type."""

    kind: str


def describe(tree: PyTree) -> Described:
    """Take a tree apart.

    Raises:
        CheckpointError: for leaves, keys or containers that JSON cannot hold exactly; it names all of them.
    """
    walk = _Walk()
    skeleton = walk.node((), tree, None)
    if walk.problems:
        raise CheckpointError("save: the tree cannot be saved exactly:\n  " + "\n  ".join(walk.problems))
    return Described(skeleton, walk.leaves, walk.contents)


class _Walk:
    """Visits a tree once, and collects what is in it and what cannot be."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.contents: dict[Path, Any] = {}
        self.problems: list[str] = []

    def node(self, path: Path, tree: Any, owner: Path | None) -> Json:
        if tree is None:
            self.contents[path] = Container("None")
            return None
        if isinstance(tree, Tensor):
            self.contents[path] = tree
            return {"tensor": self.number(path, tree, owner)}
        if type(tree) in (dict, OrderedDict):
            # In the order of insertion, which optree's own walk would sort away.
            return self.container(path, type(tree).__name__, list(tree), list(tree.values()), owner)
        if optree.tree_is_leaf(tree, namespace=NAMESPACE):
            self.contents[path] = tree
            return self.scalar(path, tree)
        return self.registered(path, tree, owner)

    def number(self, path: Path, tensor: Tensor, owner: Path | None) -> int:
        """The number of a tensor: that of one before it when it is the same memory, as tied weights are."""
        problem = not_plain(tensor)
        if problem:
            self.problems.append(f"{dotted(path)}: {problem}")
            return 0
        new = len(self.leaves)
        number = self._numbers.setdefault(_memory(tensor) if tensor.numel() else (new,), new)
        if number == new:
            self.leaves.append(Leaf(path, tensor, owner))
        return number

    def registered(self, path: Path, tree: Any, owner: Path | None) -> Json:
        children, static, entries, _ = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
        kind = type(tree)
        if kind in (list, tuple):
            return self.container(path, kind.__name__, range(len(tree)), children, owner)
        if optree.is_namedtuple(tree):
            return self.container(path, f"{NAMED_TUPLE}{kind.__name__}", entries, children, owner)
        tag = tree_tag(kind)
        if tag in TREE_CLASSES:
            owner = path if kind is TrainState else owner
            return self.container(path, tag, entries, children, owner, static=static)
        self.problems.append(
            f"{dotted(path)}: a {class_name(kind)}; needs dicts, lists, tuples and ftrain's own classes"
        )
        return None

    def container(
        self,
        path: Path,
        kind: str,
        keys: Sequence[Any],
        children: Sequence[Any],
        owner: Path | None,
        *,
        static: Any = (),
    ) -> Json:
        self.contents[path] = Container(kind)
        bad = [key for key in keys if type(key) not in KEYS]
        self.problems.extend(f"{dotted(path)}: the key {key!r} is no str, int or bool" for key in bad)
        node = {
            "kind": kind,
            "keys": [key for key in keys if type(key) in KEYS],
            "nodes": [self.node((*path, key), child, owner) for key, child in zip(keys, children, strict=True)],
        }
        return {**node, "static": [self.scalar(path, value) for value in static]} if static else node

    def scalar(self, path: Path, value: Any) -> Json:
        try:
            return encode(value)
        except CheckpointError:
            self.problems.append(
                f"{dotted(path)}: {value!r:.60} is a {class_name(type(value))}; needs a tensor, bool, int, float, "
                "complex, str or bytes"
            )
            return None


def not_plain(tensor: Tensor) -> str:
    """Say why a tensor is not a block of numbers that a file can hold; "" when it is."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"a {class_name(type(tensor))}; needs a plain tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}; needs a dense one"
    if tensor.is_meta:
        return "on the device meta, without values"
    name = str(tensor.dtype).removeprefix("torch.")
    return "" if name in DTYPES else f"{name}, a dtype that cannot be saved"


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors agree in that are one."""
    view = tensor.dtype, tensor.is_conj(), tensor.is_neg(), tuple(tensor.shape), tensor.stride()
    return tensor.device, tensor.data_ptr(), *view


def rebuild(skeleton: Json, tensors: Mapping[int, Tensor]) -> PyTree:
    """Put a tree together again.

    Raises:
        CheckpointError: for JSON that is no such tree, or holds classes that are not ftrain's own.
    """
    if skeleton is None:
        return None
    if not _is_container(skeleton):
        return _leaf(skeleton, tensors)
    kind, keys, nodes = _parts(skeleton)
    static = [decode(value) for value in _list(skeleton.get("static", []))]
    return _made(kind, keys, [rebuild(node, tensors) for node in nodes], static)


def contents(skeleton: Json, tensors: Sequence[Any]) -> dict[Path, Any]:
    """Return what is at each path of a saved tree: a `Container`, one of `tensors`, or another leaf.

    Raises:
        CheckpointError: for JSON that is no such tree.
    """
    found: dict[Path, Any] = {}

    def visit(path: Path, node: Json) -> None:
        if node is None:
            found[path] = Container("None")
        elif _is_container(node):
            kind, keys, nodes = _parts(node)
            found[path] = Container(kind)
            for key, child in zip(keys, nodes, strict=True):
                visit((*path, key), child)
        else:
            found[path] = _leaf(node, tensors)

    visit((), skeleton)
    return found


def _made(kind: str, keys: list[Any], children: list[Any], static: list[Any]) -> Any:
    if kind in ("dict", "OrderedDict"):
        return CONTAINERS[kind](zip(keys, children, strict=True))
    if kind in CONTAINERS:
        return CONTAINERS[kind](children)
    restore = TREE_CLASSES.get(kind)
    if restore is None:
        raise CheckpointError(f"load: the tree holds a {kind}, which only a tree of its kind can give back; pass like=")
    try:
        return restore(dict(zip(keys, children, strict=True)), static)
    except (StructureError, TypeError) as error:
        raise CheckpointError(f"load: the manifest holds no {kind}: {error}") from None


def _is_container(node: Json) -> bool:
    return isinstance(node, dict) and "kind" in node


def _parts(node: dict[str, Any]) -> tuple[str, list[Any], list[Any]]:
    kind, keys, nodes = node["kind"], _list(node.get("keys")), _list(node.get("nodes"))
    if not isinstance(kind, str) or len(keys) != len(nodes) or any(type(key) not in KEYS for key in keys):
        raise CheckpointError(f"load: the tree in the manifest is malformed at a {kind!r:.60}")
    kind = VERSION_1_TAGS.get(kind, kind)
    # As a dict sees them, to which True and 1 are one.
    if len(set(keys)) != len(keys):
        raise CheckpointError(f"load: the tree in the manifest has a key twice at a {kind}")
    if kind in ("list", "tuple") and keys != [*range(len(keys))]:
        raise CheckpointError(f"load: the tree in the manifest has a {kind} of other keys than 0, 1, 2, ...")
    return kind, keys, nodes


def _list(value: Json) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"load: the tree in the manifest is malformed: {value!r:.60} is no list")
    return value


def _leaf(node: Json, tensors: Sequence[Any] | Mapping[int, Any]) -> Any:
    if isinstance(node, dict) and node.keys() == {"tensor"}:
        number = node["tensor"]
        if type(number) is not int or number < 0:
            raise CheckpointError(f"load: the tree in the manifest has a tensor numbered {number!r:.60}")
        try:
            return tensors[number]
        except LookupError:
            raise CheckpointError(f"load: the tree in the manifest has a tensor {number}, and there is none") from None
    return decode(node)


def encode(value: Any) -> Json:
    """Write a scalar exactly.

    Raises:
        CheckpointError: for a value of another type, subclasses included.

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
    """Read what `encode` wrote.

    Raises:
        CheckpointError: for anything else.
    """
    try:
        if type(node) in (bool, int, str):
            return node
        ((kind, value),) = node.items()
        if kind == "float":
            return float.fromhex(value)
        if kind == "complex":
            real, imaginary = map(float.fromhex, _list(value))
            return complex(real, imaginary)
        if kind == "bytes":
            return bytes.fromhex(value)
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise CheckpointError(f"load: the tree in the manifest has a leaf that is none: {node!r:.60}")


def children(skeleton: Json) -> dict[Any, Json]:
    """Return the nodes right below a node that is a container.

    Raises:
        CheckpointError: when it is none.
    """
    if not _is_container(skeleton):
        raise CheckpointError("load: the manifest holds a leaf where a container is expected")
    _, keys, nodes = _parts(skeleton)
    return dict(zip(keys, nodes, strict=True))


def class_name(kind: type) -> str:
    """Return the name of a class with its module, for messages."""
    return f"{kind.__module__}.{kind.__qualname__}"


def dotted(path: Path) -> str:
    """Write a path as users see it.

    >>> dotted(("params", 0, "w")), dotted(())
    ('params.0.w', 'the tree')
    """
    return ".".join(map(str, path)) or "the tree"


def printable(text: str) -> str:
    r"""Write a name so that nothing in it moves a cursor, and any terminal and file takes it.

    >>> print(printable("a\x1b[2J"), printable("b\udcff"))
    a\x1b[2J b\udcff
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
