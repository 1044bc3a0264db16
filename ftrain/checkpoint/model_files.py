"""The file of a checkpoint in which a tensor is, and its name there.

A model has a file of its own, with the names of its module, for readers that know nothing of ftrain. In a run its
frozen parameters are in a second one, which later checkpoints share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from typing import Any

from ftrain._torch import on_meta
from ftrain.checkpoint.layout import strides
from ftrain.checkpoint.manifest import FILE_NAME, TensorEntry
from ftrain.checkpoint.treedef import Container, FlatTree, dotted
from ftrain.tree import dtype_name
from ftrain.types import TrainState, tree_tag

STATE = "state.safetensors"
MODEL_FIELDS = "params", "frozen", "buffers"
FROZEN, TRAINED = "-frozen", "-trained"
"""Ends of the names of the two files of a model whose frozen parameters have a file of their own."""


def frozen_numbers(flat: FlatTree) -> frozenset[int]:
    """Return the numbers of the frozen parameters of the states in a tree."""
    numbers = [number for number, leaf in enumerate(flat.leaves) if "frozen" in leaf.path]
    if not numbers:
        return frozenset()
    states = _paths_of_states(flat)

    def has_file_of_model(path: tuple[Any, ...]) -> bool:
        return _within_state(path, states)[1][:1] == ("frozen",) and _file_and_key(path, states, FROZEN)[0] != STATE

    return frozenset(number for number in numbers if has_file_of_model(flat.leaves[number].path))


def tensor_entries(flat: FlatTree, frozen: Set[int]) -> list[TensorEntry]:
    """Choose a file and a name in it for each tensor; those with the numbers `frozen` get files of their own."""
    states = _paths_of_states(flat)
    used: set[tuple[str, str]] = set()
    entries = []
    for number, leaf in enumerate(flat.leaves):
        ending = (FROZEN if number in frozen else TRAINED) if frozen else ""
        file, name = _file_and_key(leaf.path, states, ending)
        key, count = name, 0
        # Different paths may have the same text, and safetensors reserves one name.
        while (file, key) in used or key == "__metadata__":
            count += 1
            key = f"{name}#{count}"
        used.add((file, key))
        dtype, shape = dtype_name(leaf.value.dtype), tuple(leaf.value.shape)
        entries.append(TensorEntry(dotted(leaf.path), dtype, shape, file, key, "", strides(on_meta(leaf.value))))
    return entries


def _paths_of_states(flat: FlatTree) -> list[tuple[Any, ...]]:
    state = Container(tree_tag(TrainState))
    return [path for path, item in flat.items_by_path().items() if type(item) is Container and item == state]


def _within_state(path: tuple[Any, ...], states: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Divide the path of a leaf at its innermost state, ``(path of the state, path in it)``; ``(path, ())`` if none."""
    state_path = max((state for state in states if path[: len(state)] == state), key=len, default=path)
    return state_path, path[len(state_path) :]


def _file_and_key(path: tuple[Any, ...], states: Sequence[tuple[Any, ...]], ending: str) -> tuple[str, str]:
    """Return the file of a leaf and its name there: a model has a file of its own, with the names of its module.

    `ending` is FROZEN or TRAINED if it has two.
    """
    state_path, within = _within_state(path, states)
    if len(within) < 2 or within[0] not in MODEL_FIELDS:
        return STATE, dotted(path)
    name = ".".join(str(part) for part in (state_path[1:] if state_path[:1] == ("state",) else state_path)) or "model"
    file = f"params/{name}{ending}.safetensors"
    return (file if FILE_NAME.fullmatch(file) else STATE), ".".join(map(str, within[1:]))


def indices(entries: Sequence[TensorEntry]) -> dict[str, str]:
    """Return the text of the index of each model that has two files, by its name, as Hugging Face's readers expect it.

    Source: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints
    """
    places: dict[str, dict[str, str]] = {}
    for entry in entries:
        if entry.file != STATE:
            model = entry.file.removesuffix(".safetensors").removesuffix(FROZEN).removesuffix(TRAINED)
            places.setdefault(f"{model}.safetensors.index.json", {})[entry.key] = entry.file.rpartition("/")[2]
    return {name: json.dumps({"metadata": {}, "weight_map": of_key}, indent=1) for name, of_key in places.items()}
