"""Choose the file of a checkpoint in which a tensor is saved, and its name in this file.

The tensors of a model have a file of their own, under the names in its module, so that any reader of safetensors can
load it. In a run the frozen parameters are in a second file, which later checkpoints share.
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
    """Return the numbers of the frozen parameters of the states in a tree, except those in `STATE`."""
    candidates = [number for number, leaf in enumerate(flat.leaves) if "frozen" in leaf.path]
    if not candidates:
        # Most trees have none, and `_paths_of_states` visits the whole tree.
        return frozenset()
    states = _paths_of_states(flat)

    def is_in_model_file(path: tuple[Any, ...]) -> bool:
        _, within = _within_state(path, states)
        file, _ = _file_and_key(path, states, FROZEN)
        return within[:1] == ("frozen",) and file != STATE

    return frozenset(number for number in candidates if is_in_model_file(flat.leaves[number].path))


def tensor_entries(flat: FlatTree, frozen: Set[int]) -> list[TensorEntry]:
    """Return the manifest's entry of each tensor, without its digest.

    The tensors with the numbers `frozen` get files of their own.
    """
    states = _paths_of_states(flat)
    used: set[tuple[str, str]] = set()
    entries = []
    for number, leaf in enumerate(flat.leaves):
        ending = ""
        if frozen:
            ending = FROZEN if number in frozen else TRAINED
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
    """Return the path of each `TrainState` in a tree."""
    state = Container(tree_tag(TrainState))
    return [path for path, item in flat.items_by_path().items() if type(item) is Container and item == state]


def _within_state(path: tuple[Any, ...], states: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split the path of a leaf into that of its innermost state and the path in it; ``(path, ())`` without a state."""
    state_path = max((state for state in states if path[: len(state)] == state), key=len, default=path)
    return state_path, path[len(state_path) :]


def _file_and_key(path: tuple[Any, ...], states: Sequence[tuple[Any, ...]], ending: str) -> tuple[str, str]:
    """Return the file of a leaf, and its name in this file: its dotted path in the model, or in the tree.

    `ending` is FROZEN or TRAINED if the model has two files, else "".
    """
    state_path, within = _within_state(path, states)
    if len(within) < 2 or within[0] not in MODEL_FIELDS:
        return STATE, dotted(path)
    # A model is named after the path of its state. The state of a run is at "state", and its model is called "model".
    model_path = state_path[1:] if state_path[:1] == ("state",) else state_path
    model = ".".join(map(str, model_path)) or "model"
    file = f"params/{model}{ending}.safetensors"
    return (file if FILE_NAME.fullmatch(file) else STATE), ".".join(map(str, within[1:]))


def indices(entries: Sequence[TensorEntry]) -> dict[str, str]:
    """Return an index for each model that has two files, by the name of the index: JSON that maps tensors to files.

    Format: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints
    """
    weight_maps: dict[str, dict[str, str]] = {}
    for entry in entries:
        if entry.file != STATE:
            model = entry.file.removesuffix(".safetensors").removesuffix(FROZEN).removesuffix(TRAINED)
            weight_map = weight_maps.setdefault(f"{model}.safetensors.index.json", {})
            weight_map[entry.key] = entry.file.rpartition("/")[2]
    return {
        name: json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
        for name, weight_map in weight_maps.items()
    }
