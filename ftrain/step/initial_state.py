"""The parameters and buffers of a new state: those given, those of a module or a file, or what a module draws."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from ftrain import backends, random, tree
from ftrain.checkpoint.stored_tensor import StoredTensor, stored_tensors
from ftrain.errors import StructureError
from ftrain.step.initialise import initialised
from ftrain.step.state_checks import require_params, select_trainable
from ftrain.step.swap_params import named_tensors
from ftrain.tree.name_patterns import Select
from ftrain.types import Adapters, PyTree

Parts: TypeAlias = tuple[PyTree, PyTree, PyTree]
"""Trained parameters, frozen parameters and buffers."""


def initial_parts(
    step: Any, params: PyTree, buffers: PyTree, seed: int, device: torch.device | None, donate: bool
) -> Parts:
    """Return the parameters and buffers of the first state of a `Step`.

    Args:
        step: the step.
        params: a tree of tensors; the path of safetensors; or None for those of the module.
        buffers: a tree of tensors, or None for those of the module.
        seed: of what is drawn.
        device: where the state lives; None: where the tensors are.
        donate: whether tensors need not be copied.

    Raises:
        StructureError: for no parameters, or one that is not a floating-point tensor; for a tensor on the device meta
            that nothing initialises; for files that do not fit the module.
        CheckpointError: when a file cannot be read.
    """
    module, path = step.base.module, Path(params) if isinstance(params, str | os.PathLike) else None
    if module is None and (params is None or path is not None):
        raise StructureError(f"Step.init: {step.base.text} is no module; pass the parameters: step.init(params)")
    initial_params, initial_buffers, names = step.base.initial()
    adapters, trainable = step.loss.adapters, step.trainable
    if adapters is not None and trainable is None:
        trainable = []
    if names is not None and not names and trainable is None:
        raise StructureError(
            f"Step.init: there is no parameter to train: none of {type(module).__name__} requires a gradient; set "
            "requires_grad, or say which train with trainable="
        )
    is_of_module = params is None or path is not None
    params = initial_params if is_of_module else params
    if names is not None:
        names |= set(tree.leaf_names(params)) - initial_params.keys()
    places = [wrapper.step.place for wrapper in step.wrappers if wrapper.step and wrapper.step.place]
    placement = _Placement(select_trainable(trainable, names, params), adapters, seed, device, donate, places)
    # All ranks place block by block, or none does: the module of some may be on the device meta.
    if is_of_module and module is not None and buffers is None and (places or path or _is_on_meta(module)):
        return placement.of_module(module, (list(params), list(initial_buffers)), path)
    return placement.of_trees(params, initial_buffers if buffers is None else buffers)


@dataclass(frozen=True)
class _Placement:
    """What parameters and buffers go through until they are those of a state.

    Args:
        chosen: ``(name, leaf) -> bool``, whether a parameter trains.
        adapters: what a wrapper adds to the parameters.
        seed: of the adapters, and of a module that draws its values.
        device: where the state lives; None: where the tensors are.
        donate: whether tensors need not be copied.
        places: functions of the parts, such as one that divides them over ranks.
    """

    chosen: Select
    adapters: Adapters | None
    seed: int
    device: torch.device | None
    donate: bool
    places: Sequence[Callable[[PyTree, PyTree, PyTree], Parts]]

    def of_trees(self, params: PyTree, buffers: PyTree) -> Parts:
        """Return the parts of a state with these tensors.

        Raises:
            StructureError: for a trained parameter that is not a floating-point tensor.
        """
        params, buffers = (tree.take if self.donate else tree.clone)((params, buffers))
        if self.adapters is not None:  # They may depend on the values of the base.
            params, buffers = _read((params, buffers))
        params, frozen = tree.split(params, self.chosen)
        if self.adapters is not None:
            params, frozen = self.adapters.added(params, frozen, random.key(self.seed))
        in_memory = tree.map(lambda leaf: None if isinstance(leaf, StoredTensor) else leaf, params)
        if tree.leaves(in_memory):
            require_params(in_memory)
        parts = params, frozen if tree.leaves(frozen) else None, buffers
        if self.device is not None:
            parts = tree.to(parts, self.device)
        for place in self.places:
            parts = place(*parts)
        placed: Parts = _read(parts)
        return placed

    def of_module(self, module: nn.Module, names: tuple[Sequence[str], Sequence[str]], path: Path | None) -> Parts:
        """Return the parts of a state with the tensors of a module, of which each block is placed before the next.

        Tensors on the device meta are made on the device of the state, and initialised.

        Args:
            module: the module.
            names: of its parameters and of its buffers.
            path: of safetensors that have values for the module. Default: none.

        Raises:
            StructureError: for files without some tensors of the module, or with others of these names; for a tensor
                that nothing initialises.
        """
        on_meta = _is_on_meta(module)
        device = self.device or (backends.default().device if on_meta else tree.device_of(dict(named_tensors(module))))
        # The tensors of a block are copies already.
        placement = dataclasses.replace(self, device=device if on_meta else self.device, donate=True)
        stored = {} if path is None else _stored(module, path, device)
        params: dict[str, Any] = {}
        frozen: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        for tensors in initialised(module, self.seed, device, stored):
            block = ({name: tensors[name] for name in each if name in tensors} for each in names)
            for whole, part in zip((params, frozen, buffers), placement.of_trees(*block), strict=True):
                whole.update(part or {})
        order = {name: number for number, name in enumerate((*names[0], *names[1]))}
        params, frozen, buffers = (
            dict(sorted(part.items(), key=lambda item: order.get(item[0], len(order))))
            for part in (params, frozen, buffers)
        )
        # A block without frozen parameters has none of their places either.
        return params, {name: frozen.get(name) for name in params} if tree.leaves(frozen) else None, buffers


def _is_on_meta(module: nn.Module) -> bool:
    """Whether a tensor of a module is on the device meta."""
    return any(tensor.is_meta for _, tensor in named_tensors(module))


def _read(parts: PyTree) -> Any:
    return tree.map(lambda leaf: leaf.read() if isinstance(leaf, StoredTensor) else leaf, parts)


def _stored(module: nn.Module, path: Path, device: torch.device) -> dict[str, StoredTensor]:
    """Return the tensors in files that belong to a module, by its names."""
    in_files, stored, problems = stored_tensors(path), {}, []
    # The tensors that a module saves, without those that it computes when it is built.
    saved = module.state_dict(keep_vars=True)
    aliases = defaultdict(list)
    for alias, tensor in saved.items():
        aliases[id(tensor)].append(alias)
    for name, tensor in named_tensors(module):
        if id(tensor) not in aliases:
            continue
        in_file = next((in_files[each] for each in _spellings(module, aliases[id(tensor)]) if each in in_files), None)
        if in_file is None:
            problems.append(f"{name}: missing")
        elif in_file.shape != tuple(tensor.shape):
            problems.append(f"{name}: found {list(in_file.shape)}, needs {list(tensor.shape)}")
        else:
            stored[name] = in_file.like(tensor, device)
    if problems:
        more = [f"and {len(problems) - tree.MAX_LISTED} more"] if len(problems) > tree.MAX_LISTED else []
        listed = "\n  ".join(problems[: tree.MAX_LISTED] + more)
        raise StructureError(
            f"Step.init: {path} does not fit {type(module).__name__}; it has {', '.join(list(in_files)[:3])}, ...:\n  "
            f"{listed}\nMake the module from these files with the library that wrote them (from_pretrained), and call "
            "step.init() without a path"
        )
    return stored


def _spellings(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return names of a tensor in files: also with and without the prefix that transformers gives the inner model."""
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    return [*names, *(name.removeprefix(prefix) for name in names), *(prefix + name for name in names)]
