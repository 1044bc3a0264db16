"""Match a checkpoint to the tree given as like=, and list the differences in one error."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import optree
from torch import Tensor

from ftrain import tree as trees
from ftrain._torch.dtensor import is_dtensor, with_local_part
from ftrain.checkpoint.manifest import TensorEntry
from ftrain.checkpoint.treedef import Container, class_name, dotted, printable
from ftrain.errors import MAX_LINES, OptionError, StructureError, first_lines, listed
from ftrain.tree import dtype_name
from ftrain.tree.wrapped_tensors import parts_of, with_parts
from ftrain.types import NAMESPACE, PyTree, TrainState, tree_tag

CHANGED = (
    "if dtypes alone differ, load without like= and convert, ft.tree.map(lambda leaf, other: leaf.to(other.dtype), "
    "loaded, like); to keep the leaf of like instead, partial=True with rename={its path: 'unused'}"
)
"""What to do about a leaf of another shape or dtype."""
OTHER_NAMES = "partial=True loads the leaves that it has, rename= maps names"
"""What to do about other differences."""
SAVED_AS_FROZEN = (
    "a parameter that is None in it was frozen: to train it, load without like=, put the state into the module, "
    "ft.to_module(module, state), and begin with step.init()"
)
"""What to do about a parameter that a state of `like` trains and the saved one does not."""
STATE = Container(tree_tag(TrainState))
"""The item at the path of a `TrainState`."""
ADAPTER = re.compile(r"params\.(?:(?:.*\.)?lora_.*|adapters\..*\.[AB])")
"""Matches the path in a state of an adapter of `ftrain.lora`: of a module, or of a tree of tensors."""


def rename_paths(saved: dict[tuple[Any, ...], Any], rename: Mapping[str, str]) -> dict[Any, Any]:
    """Return the items of a checkpoint by their new paths, as texts with dots; unchanged if `rename` is empty.

    A renamed leaf replaces one that has its new path, for example averages replace parameters. Raises an OptionError
    when no path begins with one of the old names, or two leaves get one name in another way.
    """
    if not rename:
        return saved
    kept, moved, used = dict[str, Any](), dict[str, Any](), set[str]()
    for path, item in saved.items():
        name = dotted(path)
        old_names = [old for old in rename if name == old or name.startswith(f"{old}.")]
        longest = max(old_names, key=len, default="")
        used.update(old_names)
        place, name = (moved, rename[longest] + name[len(longest) :]) if old_names else (kept, name)
        earlier = place.setdefault(name, item)
        if earlier is not item and not isinstance(item, Container):
            if not isinstance(earlier, Container):
                raise OptionError(
                    f"load: with rename={dict(rename)}, two leaves of the checkpoint are called {name}; give them two "
                    "names, or load it without rename="
                )
            place[name] = item
    if unused := [old for old in rename if old not in used]:
        paths = ", ".join(map(dotted, saved))
        raise OptionError(
            f"load: rename has {', '.join(map(repr, unused))}, and no path begins with it; there are {paths:.300}"
        )
    # A renamed container does not replace a leaf. For example, if `frozen` becomes `params`, the None at the place of a
    # parameter that is not frozen must not replace this parameter.
    containers = {name: item for name, item in moved.items() if isinstance(item, Container)}
    return {**containers, **kept, **{name: item for name, item in moved.items() if name not in containers}}


def match_leaves(
    saved: dict[Any, Any], wanted: dict[tuple[Any, ...], Any], where: str, *, partial: bool
) -> dict[tuple[Any, ...], Any]:
    """Return the saved item for each leaf of `like`, by its path.

    `saved` are the items of the checkpoint, by path or by text of `rename_paths`; `wanted` are the items of `like`;
    `where` is the checkpoint for errors. Raises a StructureError that lists the differences. With ``partial`` missing
    and additional leaves are allowed, but not a result without a parameter of a model, or without its adapters.
    """
    by_name = any(isinstance(key, str) for key in saved)
    if partial:
        saved = _with_frozen(saved, wanted, by_name=by_name)
    containers_may_differ = partial or by_name
    matched, used = {}, set()
    problems, advice = list[str](), OTHER_NAMES
    for path, wanted_item in wanted.items():
        key = dotted(path) if by_name else path
        used.add(key)
        is_container = isinstance(wanted_item, Container)
        if key not in saved:
            # A container may have no saved item when its leaves were renamed.
            if not partial and not (by_name and is_container):
                problems.append(f"{dotted(path)}: missing, needs {_description(wanted_item)}")
            continue
        if is_container and containers_may_differ:
            continue
        item = saved[key]
        if not _matches(item, wanted_item):
            problems.append(f"{dotted(path)}: found {_description(item)}, needs {_description(wanted_item)}")
            if not is_container:
                advice = SAVED_AS_FROZEN if item == Container("None") else CHANGED
        elif not is_container:
            matched[path] = item
    for key, item in saved.items():
        if key not in used and not partial and not (containers_may_differ and isinstance(item, Container)):
            problems.append(f"{key if by_name else dotted(key)}: unexpected {_description(item)}")
    if problems:
        text = f"load: {where} does not have the structure of like ({len(problems)} differences; "
        raise StructureError(f"{text}{advice}):{first_lines([*map(printable, problems)], MAX_LINES)}")
    if partial:
        tensors = [key for key, item in saved.items() if key not in used and isinstance(item, TensorEntry)]
        _require_models(wanted, matched, [key if by_name else dotted(key) for key in tensors], where)
    return matched


def _require_models(
    wanted: Mapping[tuple[Any, ...], Any], matched: Collection[tuple[Any, ...]], unused: Sequence[str], where: str
) -> None:
    """Check that a ``partial`` load would load the models in `like`; a user would not notice that one stays as it is.

    `matched` are the paths of the leaves to load, `unused` the saved tensors that would not be loaded. Raises a
    StructureError when nothing would be loaded, or no parameter of a state, or a state without its saved adapters.
    """
    needs = listed([dotted(path) for path, wanted_item in wanted.items() if isinstance(wanted_item, Tensor)])
    differs = (
        f"of like, which would stay as it is: it has {printable(listed(unused))}, and like has {printable(needs)}. "
        "Nest like as what was saved is, such as {'state': state}, or map names with rename="
    )
    if not matched:
        raise StructureError(f"load: {where} has no leaf {differs}")
    for state in [path for path, wanted_item in wanted.items() if wanted_item == STATE]:
        start = "".join(f"{part}." for part in state)
        within = [name.removeprefix(start) for name in unused if name.startswith(start)]
        model_paths = (*state, "params"), (*state, "frozen")
        loads_parameter = any(path[: len(state) + 1] in model_paths for path in matched)
        if not loads_parameter and any(name.startswith("params.") for name in within):
            raise StructureError(f"load: {where} has no parameter {differs}")
        if adapters := [f"{start}{name}" for name in within if ADAPTER.fullmatch(name)]:
            raise StructureError(
                f"load: {where} has adapters, for which like has no place, and without which its weights are those of "
                f"before the fine-tuning: {printable(listed(adapters))}. Add them to the weights with the step of that "
                "run, merged = ft.adapters.merge(step, state), given the state that is loaded without like=, and begin "
                "with ft.to_module(module, merged); to leave them out, rename= their paths to 'unused'"
            )


def _with_frozen(saved: dict[Any, Any], wanted: Mapping[tuple[Any, ...], Any], *, by_name: bool) -> dict[Any, Any]:
    """Return the saved items; a trained parameter that is frozen in a state of `like` is also at its frozen path.

    Without this, ``partial`` would not find it there, and the state would keep the untrained value of `like`.
    """
    frozen = {}
    for path, wanted_item in wanted.items():
        for depth, field in enumerate(path):
            if field == "frozen" and isinstance(wanted_item, Tensor) and wanted[path[:depth]] == STATE:
                trained = (*path[:depth], "params", *path[depth + 1 :])
                new, old = (dotted(path), dotted(trained)) if by_name else (path, trained)
                if isinstance(saved.get(old), TensorEntry) and not isinstance(saved.get(new), TensorEntry):
                    frozen[new] = saved[old]
    return {**saved, **frozen}


def _matches(item: Any, wanted_item: Any) -> bool:
    """Whether a saved item can take the place of an item of `like`.

    Containers need the same tag, tensors the same dtype and shape, other leaves the same type.
    """
    if isinstance(item, TensorEntry):
        return isinstance(wanted_item, Tensor) and (item.dtype, item.shape) == (
            dtype_name(wanted_item.dtype),
            tuple(wanted_item.shape),
        )
    if isinstance(item, Container):
        return bool(item == wanted_item)
    return type(item) is type(wanted_item)


def _description(item: Any) -> str:
    """Return the tag of a container, the dtype and shape of a tensor, or the type of another leaf, for messages."""
    if isinstance(item, Container):
        return item.kind
    if isinstance(item, TensorEntry):
        return f"{item.dtype}{list(item.shape)}"
    return trees.describe(item) if isinstance(item, Tensor) else class_name(type(item)).removeprefix("builtins.")


def fill_like(like: PyTree, values: Mapping[tuple[Any, ...], Any], *, on_host: bool) -> PyTree:
    """Return `like` with new leaves, moved to the devices of the old ones unless ``on_host``."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(like, namespace=NAMESPACE)
    paths = [tuple(entry.entry for entry in accessor) for accessor in accessors]
    return trees.unflatten(
        spec, [_fill_leaf(leaf, path, values, on_host=on_host) for path, leaf in zip(paths, leaves, strict=True)]
    )


def _fill_leaf(leaf: Any, path: tuple[Any, ...], values: Mapping[tuple[Any, ...], Any], *, on_host: bool) -> Any:
    """Return the new value of a leaf; a tensor that is made of inner tensors is made again of their new values."""
    parts = parts_of(leaf) if isinstance(leaf, Tensor) else {}
    if not parts:
        return _to_device_of(values.get(path, leaf), leaf, on_host)
    new = {name: _fill_leaf(part, (*path, name), values, on_host=on_host) for name, part in parts.items()}
    return with_parts(leaf, new)


def _to_device_of(value: Any, leaf: Any, on_host: bool) -> Any:
    """Return a new value on the device of `leaf`, unless ``on_host``; a block of a DTensor becomes a DTensor."""
    if not isinstance(value, Tensor):
        return value
    if not on_host:
        value = value.to(leaf.device)
    if is_dtensor(leaf) and not is_dtensor(value):
        return with_local_part(leaf, value.contiguous())
    return value
