"""What of a checkpoint belongs to which leaf of a tree, and everything that does not fit at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
from torch import Tensor

from ftrain import tree as trees
from ftrain.checkpoint.manifest import Stored
from ftrain.checkpoint.treedef import NAMED_TUPLE, Container, class_name, dotted, printable
from ftrain.errors import OptionError, StructureError
from ftrain.types import NAMESPACE, PyTree


def renamed(found: dict[tuple[Any, ...], Any], rename: Mapping[str, str]) -> dict[Any, Any]:
    """Return what is at each path by new paths, which are written with dots, as the new names are.

    Raises:
        OptionError: for an old name that nothing has.
    """
    if not rename:
        return found
    moved, used = {}, set()
    for at, item in found.items():
        name = dotted(at)
        olds = [old for old in rename if name == old or name.startswith(f"{old}.")]
        longest = max(olds, key=len, default="")
        used.update(olds)
        moved[rename[longest] + name[len(longest) :] if olds else name] = item
    if unused := [old for old in rename if old not in used]:
        known = ", ".join(map(dotted, found))
        raise OptionError(f"load: rename has {', '.join(map(repr, unused))}, and nothing is called so: {known:.300}")
    return moved


def choose(
    found: dict[Any, Any], wanted: dict[tuple[Any, ...], Any], where: str, *, partial: bool
) -> dict[tuple[Any, ...], Any]:
    """Return what to take of a checkpoint for each leaf of a tree.

    Raises:
        StructureError: with all differences; of a partial tree, with those in shape and dtype.
    """
    by_name = any(isinstance(key, str) for key in found)
    # What leaves are in can differ when not all of them are wanted, or under the same name.
    loose = partial or by_name
    chosen, problems, used = {}, [], set()
    for at, need in wanted.items():
        key = dotted(at) if by_name else at
        item = found.get(key, need)
        used.add(key)
        if key not in found:
            problems += [f"{dotted(at)}: missing, needs {_said(need)}"] * (not partial)
        elif not _agree(item, need) and not (loose and isinstance(need, Container)):
            problems.append(f"{dotted(at)}: found {_said(item)}, needs {_said(need)}")
        elif not isinstance(need, Container):
            chosen[at] = item
    for key, item in found.items():
        if key not in used and not partial and not (loose and isinstance(item, Container)):
            problems.append(f"{key if by_name else dotted(key)}: unexpected {_said(item)}")
    if problems:
        raise StructureError(
            f"load: {where} does not have the structure of like ({len(problems)} differences; partial= takes what "
            "fits, rename= maps names):\n  " + "\n  ".join(map(printable, problems))
        )
    return chosen


def _agree(item: Any, need: Any) -> bool:
    """Whether a saved item has the container, or the dtype and shape, or the type, of one in `like`."""
    if isinstance(item, Container) and isinstance(need, Container) and need.kind.startswith(NAMED_TUPLE):
        # A manifest of version 1 has the module of a named tuple before its name.
        return need.kind in (item.kind, f"{NAMED_TUPLE}{item.kind.rpartition('.')[2]}")
    return _said(item) == _said(need)


def _said(item: Any) -> str:
    """What is compared of something at a path."""
    if isinstance(item, Container):
        return item.kind
    if isinstance(item, Stored):
        return f"{item.dtype}{list(item.shape)}"
    return trees.describe(item) if isinstance(item, Tensor) else class_name(type(item)).removeprefix("builtins.")


def filled(like: PyTree, values: Mapping[tuple[Any, ...], Any], *, on_host: bool = False) -> PyTree:
    """Return `like` with other leaves, which go where its own are, or stay on the host."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(like, namespace=NAMESPACE)
    paths = [tuple(entry.entry for entry in accessor) for accessor in accessors]
    return trees.unflatten(
        spec, [_put(values.get(at, leaf), leaf, on_host) for at, leaf in zip(paths, leaves, strict=True)]
    )


def _put(value: Any, leaf: Any, on_host: bool) -> Any:
    moves = isinstance(value, Tensor) and isinstance(leaf, Tensor) and not on_host
    return value.to(leaf.device) if moves else value
