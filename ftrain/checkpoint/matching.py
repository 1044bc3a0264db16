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
FROZEN_THERE = (
    "a parameter that is None in it was frozen: to train it, load without like=, put the state into the module, "
    "ft.to_module(module, state), and begin with step.init()"
)
"""What to do about a parameter that a state of `like` trains and the saved one does not."""
STATE = Container(tree_tag(TrainState))
ADAPTER = re.compile(r"params\.(?:(?:.*\.)?lora_.*|adapters\..*\.[AB])")
"""The path in a state of a tensor of `ftrain.lora`: of a module, or of a tree."""


def rename_paths(saved: dict[tuple[Any, ...], Any], rename: Mapping[str, str]) -> dict[Any, Any]:
    """Return the items of a checkpoint under their new paths, which are written with dots.

    A leaf that is renamed takes the place of one that has this path already: averages that of parameters, for example.
    Raises an OptionError when no path begins with one of the old names.
    """
    if not rename:
        return saved
    kept, moved, used = {}, {}, set()
    for path, item in saved.items():
        name = dotted(path)
        old_names = [old for old in rename if name == old or name.startswith(f"{old}.")]
        longest = max(old_names, key=len, default="")
        used.update(old_names)
        if old_names:
            moved[rename[longest] + name[len(longest) :]] = item
        else:
            kept[name] = item
    if unused := [old for old in rename if old not in used]:
        known = ", ".join(map(dotted, saved))
        raise OptionError(
            f"load: rename has {', '.join(map(repr, unused))}, and no path begins with it; there are {known:.300}"
        )
    # Not so a container: the None of what is not frozen, say, if `frozen` becomes `params`.
    containers = {name: item for name, item in moved.items() if isinstance(item, Container)}
    return {**containers, **kept, **{name: item for name, item in moved.items() if name not in containers}}


def match_leaves(
    saved: dict[Any, Any], wanted: dict[tuple[Any, ...], Any], where: str, *, partial: bool
) -> dict[tuple[Any, ...], Any]:
    """Return the saved item for each leaf of `like`.

    Raises a StructureError that lists the differences; with ``partial`` only those in shape and dtype, or that it would
    load nothing of a model, or a model without its adapters.
    """
    by_name = any(isinstance(key, str) for key in saved)
    if partial:
        saved = _with_frozen(saved, wanted, by_name=by_name)
    containers_may_differ = partial or by_name
    chosen, problems, used, advice = {}, list[str](), set(), OTHER_NAMES
    for path, need in wanted.items():
        key = dotted(path) if by_name else path
        item = saved.get(key, need)
        used.add(key)
        if key not in saved:
            # Renaming gives the leaves of a container other paths, and not the container.
            if not partial and not (by_name and isinstance(need, Container)):
                problems.append(f"{dotted(path)}: missing, needs {_description(need)}")
        elif not _agree(item, need) and not (containers_may_differ and isinstance(need, Container)):
            problems.append(f"{dotted(path)}: found {_description(item)}, needs {_description(need)}")
            if not isinstance(need, Container):
                advice = FROZEN_THERE if isinstance(item, Container) and item.kind == "None" else CHANGED
        elif not isinstance(need, Container):
            chosen[path] = item
    for key, item in saved.items():
        if key not in used and not partial and not (containers_may_differ and isinstance(item, Container)):
            problems.append(f"{key if by_name else dotted(key)}: unexpected {_description(item)}")
    if problems:
        text = f"load: {where} does not have the structure of like ({len(problems)} differences; "
        raise StructureError(f"{text}{advice}):{first_lines([*map(printable, problems)], MAX_LINES)}")
    if partial:
        tensors = [key for key, item in saved.items() if key not in used and isinstance(item, TensorEntry)]
        _require_models(wanted, chosen, [key if by_name else dotted(key) for key in tensors], where)
    return chosen


def _require_models(
    wanted: Mapping[tuple[Any, ...], Any], chosen: Collection[tuple[Any, ...]], unused: Sequence[str], where: str
) -> None:
    """Check that a run would not take what ``partial`` keeps of `like` for what was loaded.

    Raises a StructureError when nothing was chosen, or no parameter of a state, or not the adapters of a state.
    """
    needs = listed([dotted(path) for path, need in wanted.items() if isinstance(need, Tensor)])
    differs = (
        f"of like, which would stay as it is: it has {printable(listed(unused))}, and like has {printable(needs)}. "
        "Nest like as what was saved is, such as {'state': state}, or map names with rename="
    )
    if not chosen:
        raise StructureError(f"load: {where} has no leaf {differs}")
    for state in [path for path, need in wanted.items() if need == STATE]:
        start = "".join(f"{part}." for part in state)
        within = [name.removeprefix(start) for name in unused if name.startswith(start)]
        takes_parameter = any(path[: len(state) + 1] in ((*state, "params"), (*state, "frozen")) for path in chosen)
        if not takes_parameter and any(name.startswith("params.") for name in within):
            raise StructureError(f"load: {where} has no parameter {differs}")
        if adapters := [f"{start}{name}" for name in within if ADAPTER.fullmatch(name)]:
            raise StructureError(
                f"load: {where} has adapters, for which like has no place, and without which its weights are those of "
                f"before the fine-tuning: {printable(listed(adapters))}. Add them to the weights with the step of that "
                "run, merged = ft.adapters.merge(step, state), given the state that is loaded without like=, and begin "
                "with ft.to_module(module, merged); to leave them out, rename= their paths to 'unused'"
            )


def _with_frozen(saved: dict[Any, Any], wanted: Mapping[tuple[Any, ...], Any], *, by_name: bool) -> dict[Any, Any]:
    """Return the saved items with the parameters that were trained, and are frozen in a state of `like`.

    Without them that state would keep the values that it has, as if they had never been trained.
    """
    frozen = {}
    for path, need in wanted.items():
        for depth, field in enumerate(path):
            if field == "frozen" and isinstance(need, Tensor) and wanted[path[:depth]] == STATE:
                trained = (*path[:depth], "params", *path[depth + 1 :])
                new, old = (dotted(path), dotted(trained)) if by_name else (path, trained)
                if isinstance(saved.get(old), TensorEntry) and not isinstance(saved.get(new), TensorEntry):
                    frozen[new] = saved[old]
    return {**saved, **frozen}


def _agree(item: Any, need: Any) -> bool:
    """Whether a saved item has the container, or the dtype and shape, or the type, of an item of `like`."""
    if isinstance(item, TensorEntry):
        return isinstance(need, Tensor) and (item.dtype, item.shape) == (dtype_name(need.dtype), tuple(need.shape))
    return item == need if isinstance(item, Container) else type(item) is type(need)


def _description(item: Any) -> str:
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
    """Return the new value of a leaf; a tensor that is made of others is made again of new ones."""
    parts = parts_of(leaf) if isinstance(leaf, Tensor) else {}
    if not parts:
        return _to_device_of(values.get(path, leaf), leaf, on_host)
    new = {name: _fill_leaf(part, (*path, name), values, on_host=on_host) for name, part in parts.items()}
    return with_parts(leaf, new)


def _to_device_of(value: Any, leaf: Any, on_host: bool) -> Any:
    if not isinstance(value, Tensor) or not isinstance(leaf, Tensor):
        return value
    value = value if on_host else value.to(leaf.device)
    return with_local_part(leaf, value.contiguous()) if is_dtensor(leaf) and not is_dtensor(value) else value
