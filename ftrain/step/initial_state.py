"""The parameters and buffers of a new state: from a tree, a module or a file, or initialised by a module."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ftrain import backends, random, tree
from ftrain._torch import dtensor
from ftrain.checkpoint.layout import CODES
from ftrain.checkpoint.lazy_safetensors import FLOATS, StoredTensor, stored_tensors
from ftrain.errors import StructureError, as_path, first_lines, listed, log_on_first_rank
from ftrain.step.initialise import initialised
from ftrain.step.state_checks import mismatches, require_params, select_trainable
from ftrain.step.swap_params import named_tensors
from ftrain.tree.name_patterns import Select
from ftrain.types import Adapters, PyTree

Parts: TypeAlias = tuple[PyTree, PyTree, PyTree]
"""Trained parameters, frozen parameters and buffers."""


def initial_parts(
    step: Any, params: PyTree, buffers: PyTree, seed: int, device: torch.device | None, donate: bool
) -> Parts:
    """Return the parameters and buffers of the first state of a `Step`. Raises the errors of `Step.init`."""
    module = step.base.module
    path = as_path("Step.init", "params", params) if isinstance(params, str | os.PathLike) else None
    if module is None and (params is None or path is not None or isinstance(params, nn.Module)):
        raise StructureError(
            f"Step.init: the loss {step.base.text} has no module; pass a tree of tensors, step.init(params), or make "
            "it the loss of a module: ft.from_module(module, criterion)"
        )
    if module is not None and not (params is None or path is not None or isinstance(params, Mapping)):
        raise StructureError(
            f"Step.init: params is {tree.describe(params)}; leave it out for the values of {type(module).__name__}, or "
            "pass others as a dict by the names of its parameters, or as the path of safetensors"
        )
    initial_params, initial_buffers, names = step.base.initial()
    adapters, trainable = step.loss.adapters, step.trainable
    if adapters is not None and trainable is None:
        trainable = []
    if names is not None and not names and trainable is None:
        raise StructureError(
            f"Step.init: there is no parameter to train: none of {type(module).__name__} requires a gradient; set "
            "requires_grad, or choose some with trainable="
        )
    is_of_module = params is None or path is not None
    if is_of_module:
        params = initial_params
    elif problems := mismatches(params, initial_params):
        raise StructureError(_misfit("the parameters do not fit", module, problems))
    if module is not None and adapters is None and (extra := params.keys() - initial_params.keys()):
        raise StructureError(
            f"Step.init: params has {listed([name for name in params if name in extra])}, which is no parameter of "
            f"{type(module).__name__}, but a buffer, a second name of a shared parameter, or of another module; for "
            "values of a state_dict, call module.load_state_dict(values) first, and step.init() without params"
        )
    if names is not None:
        # A wrapper has added these to the module; they train.
        names |= set(tree.leaf_names(params)) - initial_params.keys()
    distribute = [wrapper.step.distribute for wrapper in step.wrappers if wrapper.step and wrapper.step.distribute]
    is_trainable = select_trainable(trainable, names, params)
    place = partial(_placed, is_trainable=is_trainable, adapters=adapters, seed=seed, distribute=distribute)
    # Also with `distribute`: the module of another rank may be on the device meta, and all ranks must divide the
    # state block by block if one does.
    if is_of_module and module is not None and buffers is None and (distribute or path or _is_on_meta(module)):
        its_names = list(params), list(initial_buffers)
        return _placed_by_block(place, module, its_names, path=path, seed=seed, device=device)
    return place(params, initial_buffers if buffers is None else buffers, device=device, donate=donate)


def _placed(
    params: PyTree,
    buffers: PyTree,
    *,
    is_trainable: Select,
    adapters: Adapters | None,
    seed: int,
    device: torch.device | None,
    donate: bool,
    distribute: Sequence[Callable[[PyTree, PyTree, PyTree], Parts]],
) -> Parts:
    """Return the parts of a state with these tensors, moved to `device` (None: not moved), divided by `distribute`."""
    params, buffers = (tree.take if donate else tree.clone)((params, buffers))
    if adapters is not None:  # Their initial values may depend on the whole base.
        params, buffers = tree.map(dtensor.whole, _read((params, buffers)))
    params, frozen = tree.split(params, is_trainable)
    if adapters is not None:
        params, frozen = adapters.added(params, frozen, random.key(seed))
    in_memory = tree.map(lambda leaf: None if isinstance(leaf, StoredTensor) else leaf, params)
    if tree.leaves(in_memory):
        require_params(in_memory)
    parts = params, frozen if tree.leaves(frozen) else None, buffers
    if device is not None:
        parts = tree.to(parts, device)
    for each in distribute:
        parts = each(*parts)
    placed: Parts = _read(parts)
    return placed


def _placed_by_block(
    place: Callable[..., Parts],
    module: nn.Module,
    names: tuple[Sequence[str], Sequence[str]],
    *,
    path: Path | None,
    seed: int,
    device: torch.device | None,
) -> Parts:
    """Return the parts of a state with the tensors of a module, or those stored at a path, placed block by block.

    Tensors on the device meta are created on the device of the state, and initialised. `names` are the names of the
    parameters and the names of the buffers.
    """
    on_meta = _is_on_meta(module)
    created_on = device or (backends.default().device if on_meta else tree.device_of(dict(named_tensors(module))))
    stored = {} if path is None else _stored(module, path, created_on)
    params: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for tensors in initialised(module, seed, created_on, stored):
        block = ({name: tensors[name] for name in of_part if name in tensors} for of_part in names)
        # Donated, because the tensors of a block are already copies.
        parts = place(*block, device=created_on if on_meta else device, donate=True)
        for whole, part in zip((params, frozen, buffers), parts, strict=True):
            whole.update(part or {})
    order = {name: number for number, name in enumerate((*names[0], *names[1]))}
    params, frozen, buffers = (
        dict(sorted(part.items(), key=lambda item: order.get(item[0], len(order))))
        for part in (params, frozen, buffers)
    )
    if not tree.leaves(frozen):
        return params, None, buffers
    # The paths of `params`: a block without frozen parameters has none in `frozen`.
    return params, {name: frozen.get(name) for name in params}, buffers


def _is_on_meta(module: nn.Module) -> bool:
    """Whether a tensor of a module is on the device meta."""
    return any(tensor.is_meta for _, tensor in named_tensors(module))


def _read(parts: PyTree) -> Any:
    """Read the tensors that are still in files."""
    return tree.map(lambda leaf: leaf.read() if isinstance(leaf, StoredTensor) else leaf, parts)


def _stored(module: nn.Module, path: Path, device: torch.device) -> dict[str, StoredTensor]:
    """Return the stored tensors of a module by their names in the module."""
    in_files = stored_tensors(path)
    stored: dict[str, StoredTensor] = {}
    # Only these: a module does not save buffers that its constructor computes.
    saved = module.state_dict(keep_vars=True)
    # Id of each tensor -> its names in the module.
    aliases = defaultdict(list)
    for alias, tensor in saved.items():
        aliases[id(tensor)].append(alias)
    wanted = {name: tensor for name, tensor in named_tensors(module) if id(tensor) in aliases}
    unused = dict.fromkeys(in_files)
    problems: list[str] = []
    for name, tensor in wanted.items():
        spellings = [spelling for spelling in _spellings(module, aliases[id(tensor)]) if spelling in in_files]
        if spellings:
            stored[name] = in_files[spellings[0]]
            problems += _conflicts(name, tensor, [in_files[spelling] for spelling in dict.fromkeys(spellings)])
        for spelling in spellings:
            unused.pop(spelling, None)
    if problems := mismatches(stored, wanted) + problems:
        raise StructureError(
            f"{_misfit(f'{path} does not fit', module, problems)}\nThe file has {listed(list(in_files))}. Load the "
            "module from these files with the library that wrote them (from_pretrained), and call step.init() without "
            "a path"
        )
    if unused:
        log_on_first_rank(
            "Step.init: %s has %d tensors that %s does not have, and that are left out: %s",
            path,
            len(unused),
            type(module).__name__,
            listed([*unused]),
        )
    return {name: stored[name].like(tensor, device) for name, tensor in wanted.items()}


def _conflicts(name: str, tensor: Tensor, spelled: Sequence[StoredTensor]) -> list[str]:
    """Return the reasons why stored tensors, all of them names of one tensor of a module, cannot be its values."""
    problems = [
        f"{name}: found {stored.code}, needs {tree.dtype_name(tensor.dtype)}; quantised values have no meaning without "
        "their scales"
        for stored in spelled
        if tensor.is_floating_point() and stored.code not in (*FLOATS, CODES.get(tensor.dtype))
    ]
    first, *others = (each.like(tensor, tree.HOST) for each in spelled)
    for other in others:
        if not torch.equal(first.read(), other.read()):
            problems.append(f"{name}: found {first.name} and {other.name} with different values, needs one tensor")
    return problems


def _misfit(statement: str, module: nn.Module, problems: Sequence[str]) -> str:
    return f"Step.init: {statement} {type(module).__name__}:{first_lines(problems)}"


def _spellings(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the possible names of a tensor in files: as they are, without and with the prefix of the base model.

    Models of transformers declare the prefix. A file may hold the base model alone, or a model with a head.
    """
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    return [*names, *(name.removeprefix(prefix) for name in names), *(prefix + name for name in names)]
