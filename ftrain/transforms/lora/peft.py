"""Adapters in the files of peft: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.checkpoint.import_safetensors import TensorsAndConfig, fingerprint, read_safetensors, write_safetensors
from ftrain.checkpoint.layout import CODES
from ftrain.errors import CheckpointError, StructureError
from ftrain.step.step import Step
from ftrain.step.swap_params import slots_of
from ftrain.step.wrapper import Wrapper
from ftrain.transforms.lora.lora import lora
from ftrain.transforms.lora.merging import SLOT, adapters_of
from ftrain.transforms.lora.modules import ModuleAdapters
from ftrain.types import TrainState, replace

FILES = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
MARKS = "ftrain.base"
"""The note that tells one base from another."""

# What these say is in the names and shapes of the tensors too, or does not change what is computed.
HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
}
SAME = {"r": "rank", "lora_alpha": "alpha", "use_dora": "dora", "use_rslora": "rslora"}
"""Options by their names there and here."""
BEGINNINGS = True, False, None, "gaussian", "eva", "orthogonal"
"""Of `init_lora_weights`, those that leave the base as it is."""


def save(
    directory: str | Path, step: Step, state: TrainState, *, base_model: str | None = None, task_type: str | None = None
) -> None:
    """Save the adapters of a state, and what else it trains, so that peft loads them.

    ``PeftModel.from_pretrained(base, directory)`` then computes what the state does. What `trainable` named beside
    the adapters becomes peft's `modules_to_save`, and must be whole modules. The file also notes which base it
    belongs to, for `load`; ``ftrain_digests.json`` beside it, which peft does not look at, has the sha256 of every
    tensor. It appears by one rename, when all of it is on the disk.

    Args:
        directory: to make; it must not be there.
        step: the step with `lora`, of a module.
        state: of that step, or what `ftrain.averaged` makes of it.
        base_model: name of the base, for ``base_model_name_or_path``; that of a model of transformers is known.
        task_type: of peft, such as ``"CAUSAL_LM"``.

    Raises:
        ComposeError: when the step has no `lora`.
        StructureError: when peft has no form for it: adapters of a tree, single parameters that train, modules or
            weights that are used in two places.
        CheckpointError: when `directory` is there already, or the disk does not take it.
    """
    adapters = _of_module("adapters.save", step, state)
    trained = {name: leaf for name, leaf in state.params.items() if leaf is not None}
    others = trained.keys() - adapters.names
    said = _said(adapters, _whole_modules(adapters, others, {*state.params}), others)
    said["base_model_name_or_path"] = base_model or getattr(adapters.module, "name_or_path", None) or None
    said["task_type"] = task_type
    tensors = {f"{PREFIX}{name}": leaf for name, leaf in trained.items()}
    write_safetensors(Path(directory), FILES, TensorsAndConfig(tensors, {MARKS: json.dumps(_marks(state))}, said))


def load(directory: str | Path, step: Step, state: TrainState, *, any_base: bool = False) -> TrainState:
    """Return a state with the adapters that `save` or peft has written, and an optimizer that begins.

    What `save` has written is checked, every byte; files of peft's own have no digests.

    Args:
        directory: with ``adapter_model.safetensors`` and ``adapter_config.json``.
        step: a step with `lora` of the same rank, alpha and targets; `like` makes the wrapper.
        state: of that step.
        any_base: load adapters of another base too, a finer tuned one say. Files of peft do not say of which they are,
            unless they hold its embedding.

    Raises:
        ComposeError: when the step has no `lora`.
        StructureError: when the adapters differ from those of the step, or were trained on another base; the message
            lists the differences.
        CheckpointError: when a file is missing, malformed or not the one that was saved, or uses options of peft that
            ftrain has not.
    """
    adapters, directory = _of_module("adapters.load", step, state), Path(directory)
    found = read_safetensors(directory, FILES)
    _require_options(directory, found.config)
    problems = [
        f"{theirs}: found {found.config.get(theirs)!r}, the step has {ours}={getattr(adapters.config, ours)!r}"
        for theirs, ours in SAME.items()
        if (found.config.get(theirs) or 0) != getattr(adapters.config, ours)
    ]
    named, bases = _named(directory, found)
    problems += _differences(named, {name: leaf for name, leaf in state.params.items() if leaf is not None})
    if not any_base:
        problems += _other_base(found.metadata, bases, adapters, state)
    if problems:
        shown = problems[: tree.MAX_LISTED] + ["..."] * (len(problems) > tree.MAX_LISTED)
        raise StructureError(f"adapters.load: {directory} does not fit the step:\n  " + "\n  ".join(shown))
    params = {
        name: None if leaf is None else named[name].to(device=leaf.device, dtype=leaf.dtype)
        for name, leaf in state.params.items()
    }
    slots = step.init_slots(params)
    return replace(state, params=params, opt_state=step.optimizer.init(params), slots=slots)


def like(directory: str | Path) -> Wrapper:
    """Return the `lora` wrapper that the files of an adapter describe, so that a step with it can `load` them.

    Raises:
        CheckpointError: when a file is missing or malformed, or uses options of peft that ftrain has not.
    """
    directory = Path(directory)
    found = read_safetensors(directory, FILES)
    _require_options(directory, found.config)
    named, _ = _named(directory, found)
    targets = dict.fromkeys(escape(name.rpartition(".lora_")[0]) for name in named if ".lora_" in name)
    rank, alpha = found.config["r"], found.config["lora_alpha"]
    options = {ours: bool(found.config.get(theirs)) for theirs, ours in SAME.items() if theirs.startswith("use")}
    made: Wrapper = lora(rank, alpha, targets=list(targets), dropout=found.config.get("lora_dropout") or 0.0, **options)
    return made


def _of_module(function: str, step: Step, state: TrainState) -> ModuleAdapters:
    adapters = adapters_of(function, step)
    if not isinstance(adapters, ModuleAdapters):
        raise StructureError(
            f"{function}: {step.base.text} is a loss of a tree, and peft's files are about modules; use "
            "ft.checkpoint.save(path, state.params)"
        )
    if SLOT in state.slots:
        raise StructureError(f"{function}: the adapters of this state are in its weights; ft.adapters.unmerge it first")
    return adapters


def _said(adapters: ModuleAdapters, whole: list[str], others: Iterable[str]) -> dict[str, Any]:
    config, names = adapters.config, [target.name for target in adapters.targets]
    for target in adapters.targets:
        if not target.name:
            raise StructureError("adapters.save: the adapter is of the model itself, and peft adapts its parts only")
        if target.aliases:
            raise StructureError(
                f"adapters.save: the module {target.name} is also {', '.join(target.aliases)}, and peft would adapt it "
                "in the first place only"
            )
    alpha = int(config.alpha) if config.alpha.is_integer() else config.alpha
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": alpha,
        "target_modules": _shortest(names, [name for name, _ in adapters.module.named_modules()]),
        "lora_dropout": config.dropout,
        "use_dora": config.dora,
        "use_rslora": config.rslora,
        "fan_in_fan_out": any(target.is_transposed and not target.is_embedding for target in adapters.targets),
        "bias": "none",
        "modules_to_save": whole or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _shortest(names: list[str], every: list[str]) -> list[str] | str:
    """Write targets as peft does, by the ends of names; where those would match more, as a regular expression."""
    for ends in (sorted({name.rpartition(".")[2] for name in names}), sorted(names)):
        if {name for name in every if any(name == end or name.endswith(f".{end}") for end in ends)} == set(names):
            return ends
    return "|".join(re.escape(name) for name in sorted(names))


def _whole_modules(adapters: ModuleAdapters, others: Iterable[str], every: set[str]) -> list[str]:
    """The modules whose parameters all train, of which `others` are the parameters."""
    others, module = set(others), adapters.module
    places = [slot.name for slot in slots_of(module)]
    owners = sorted({name.rpartition(".")[0] for name in others})
    for owner in owners:
        inside = {name for name in every - adapters.names if name.startswith(f"{owner}.")} if owner else set(others)
        problem = ""
        if not owner:
            problem = "of no module below the model itself"
        elif inside - others:
            problem = f"and {min(inside - others)} is frozen"
        elif any(target.name == owner or target.name.startswith(f"{owner}.") for target in adapters.targets):
            problem = "and have adapters too"
        elif shared := [name for name in sorted(inside) if places.count(name) > 1]:
            problem = f"and {shared[0]} is tied to another module's"
        elif also := [name for name, _ in module.named_modules() if name.endswith(owner) and name != owner]:
            problem = f"and peft would take {also[0]} for it"
        if problem:
            raise StructureError(
                f"adapters.save: parameters of {owner or 'the model'} train, {problem}; beside adapters peft saves "
                "whole modules only (modules_to_save). Train the whole of it, or none, or use ft.checkpoint.save"
            )
    return owners


def _marks(state: TrainState) -> dict[str, str]:
    frozen = state.frozen or {}
    plain = {name: leaf for name, leaf in frozen.items() if leaf is not None and leaf.dtype in CODES}
    return {name: fingerprint(leaf) for name, leaf in plain.items() if not _torch.is_wrapper_subclass(leaf)}


def _require_options(directory: Path, said: Mapping[str, Any]) -> None:
    kind = said.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{directory}: peft_type is {kind!r}; only LORA is supported")
    needed: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "r": ("a positive integer", lambda value: type(value) is int and value > 0),
        "lora_alpha": ("a positive number", lambda value: type(value) in (int, float) and 0 < value < math.inf),
        "lora_dropout": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value < 1),
        "modules_to_save": (
            "a list of names of modules",
            lambda value: isinstance(value, list) and all(isinstance(name, str) and name for name in value),
        ),
    }
    for name, (what, holds) in needed.items():
        value = said.get(name)
        if not (holds(value) or (value is None and name not in ("r", "lora_alpha"))):
            raise CheckpointError(f"{directory}: {FILES[1]}: {name} is {value!r:.100}, needs {what}")
    bad = [
        f"{name}={value!r}"
        for name, value in said.items()
        if value and name not in HARMLESS and name not in SAME and (name, value) != ("bias", "none")
        if name != "init_lora_weights" or value not in BEGINNINGS
    ]
    if bad:
        raise CheckpointError(
            f"{directory}: {FILES[1]} has {', '.join(bad)}, which ftrain has not; merge the adapter with peft, or "
            "train it without"
        )


def _named(directory: Path, found: TensorsAndConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a file by our names, and the weights of the base that it holds as well."""
    beside = [re.escape(name) for name in found.config.get("modules_to_save") or ()]
    trained = re.compile(rf"(^|.*\.)(lora_|({'|'.join(beside) or '$'})\.)")
    named, bases = {}, {}
    for key, tensor in found.tensors.items():
        if not key.startswith(PREFIX):
            raise CheckpointError(f"{directory}: {FILES[0]} has {key}, which does not begin with {PREFIX}")
        name = key.removeprefix(PREFIX)
        if trained.match(name):
            named[name.removesuffix(".weight") if "lora_magnitude" in name else name] = tensor
        else:
            # Embeddings that are adapted, or tied to one.
            bases[name.replace(".base_layer.", ".")] = tensor
    return named, bases


def _differences(found: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> list[str]:
    missing = [f"{name}: missing, needs {tree.describe(needed[name])}" for name in needed if name not in found]
    more = [
        f"{name}: unexpected {tree.describe(found[name])}"
        + "; it trained beside the adapters: name it in trainable=" * (".lora_" not in name)
        for name in sorted(found)
        if name not in needed
    ]
    shapes = [
        f"{name}: found {list(found[name].shape)}, needs {list(needed[name].shape)}"
        for name in needed
        if name in found and found[name].shape != needed[name].shape
    ]
    return missing + more + shapes


def _other_base(
    notes: Mapping[str, str], bases: Mapping[str, Tensor], adapters: ModuleAdapters, state: TrainState
) -> list[str]:
    """Where the base of a file is known to differ from that of a state."""
    first = {id(tensor): name for name, tensor in adapters.module.named_parameters()}
    names = {name: first[id(each)] for name, each in adapters.module.named_parameters(remove_duplicate=False)}
    weights = state.frozen or {}
    other = []
    for name, tensor in sorted(bases.items()):
        ours = weights.get(names.get(name, name))
        if ours is None or tensor.shape != ours.shape or not torch.equal(tensor.to(ours), ours):
            other.append(name)
    try:
        theirs = dict(json.loads(notes.get(MARKS, "{}")))
    except (ValueError, TypeError):
        theirs = {}
    # Of another dtype, a base may be the same one.
    for name, mark_of_ours in _marks(state).items():
        said = str(theirs.get(name))
        other += [name] * (said.partition(":")[0] == mark_of_ours.partition(":")[0] and said != mark_of_ours)
    more = f" and {len(other) - 1} more" * (len(other) > 1)
    told = "it was trained on another base, with other values in {}{}; any_base=True loads it all the same"
    return [told.format(other[0], more)] if other else []
