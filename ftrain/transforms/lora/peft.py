"""Adapters in the files of peft: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import _torch, tree
from ftrain._torch import dtensor
from ftrain.checkpoint.layout import CODES
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.safetensors_with_config import TensorsAndConfig, fingerprint, read_safetensors, write_safetensors
from ftrain.errors import CheckpointError, StructureError, as_path, first_lines, listed, warn
from ftrain.parallel.state import divided
from ftrain.step.across_ranks import ranks_of
from ftrain.step.state_checks import require_state
from ftrain.step.step import Step
from ftrain.step.wrapper import Wrapper
from ftrain.transforms.lora.lora import lora
from ftrain.transforms.lora.merging import SLOT, adapters_of, require_adapters
from ftrain.transforms.lora.modules import ModuleAdapters
from ftrain.transforms.lora.whole_modules import buffers_of, first_names, whole_modules_of
from ftrain.types import TrainState, replace

FILES = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
FINGERPRINTS = "ftrain.base"
"""The key in the metadata of a fingerprint of each tensor of the base."""

# Options of peft that the names and shapes of the tensors determine, or that do not change the result.
IGNORED = {
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
OPTIONS = {"r": "rank", "lora_alpha": "alpha", "use_dora": "dora", "use_rslora": "rslora"}
"""Names of options in peft -> in `Config`."""
INITS = True, False, None, "gaussian", "eva", "orthogonal"
"""The values of `init_lora_weights` that leave the base unchanged."""


def save(
    directory: str | Path, step: Step, state: TrainState, *, base_model: str | None = None, task_type: str | None = None
) -> None:
    """Save the adapters of a state, and other trained parameters, in files that peft loads.

    ``PeftModel.from_pretrained(base, directory)`` then computes the same as the state. Other trained parameters become
    peft's `modules_to_save`, with the buffers beside them, and must be those of whole modules. For `load`, the metadata
    has fingerprints of the base, and ``ftrain_digests.json``, which peft does not read, has the sha256 of every tensor.
    The directory appears by one rename, when everything is on the disk.

    Every rank of a step with `sharded` must call it, also at level 0; the first rank writes. One rank alone can save a
    whole state (`ftrain.parallel.whole`) with the step without `sharded`.

    Args:
        directory: new directory; it must not exist.
        step: a step with `lora`, of a module.
        state: a state of that step, also one of `ftrain.averaged`.
        base_model: peft's ``base_model_name_or_path``. Default: the name of a model of transformers.
        task_type: peft's ``task_type``, such as ``"CAUSAL_LM"``. With those of classification and of question answering
            peft needs the head in the files, so it must be trained.

    Raises:
        ComposeError: when the step has no `lora`.
        StructureError: when peft has no form for the state: adapters of a tree, trained parameters of a module that is
            not trained as a whole, modules or weights that are used twice.
        CheckpointError: when `directory` exists, or cannot be written.
        RankError: when another rank does not call it.
    """
    path, adapters = as_path("adapters.save", "directory", directory), _of_module("adapters.save", step, state)
    trained = {name: leaf for name, leaf in state.params.items() if leaf is not None}

    def described() -> dict[str, Any]:
        whole_modules = whole_modules_of(adapters, trained.keys() - adapters.names, task_type)
        _warn_of_buffers(adapters.module, state, whole_modules)
        config = _peft_config(adapters, whole_modules)
        config["base_model_name_or_path"] = base_model or getattr(adapters.module, "name_or_path", None) or None
        return {**config, "task_type": task_type}

    ranks = _ranks_with("adapters.save", step, state)
    config = ranks.on_first(described)
    buffers = buffers_of(adapters.module, state, config["modules_to_save"] or ())
    tensors = {f"{PREFIX}{name}": dtensor.whole(leaf) for name, leaf in {**trained, **buffers}.items()}
    fingerprints = {name: fingerprint(whole) for name, whole in _wholes(state) if _has_fingerprint(whole)}
    metadata = {FINGERPRINTS: json.dumps(fingerprints)}
    ranks.on_first(lambda: write_safetensors(path, FILES, TensorsAndConfig(tensors, metadata, config)))


def _warn_of_buffers(module: nn.Module, state: TrainState, whole_modules: Iterable[str]) -> None:
    """Warn of buffers that training has changed, for which the files have no place."""
    lost = (state.buffers or {}).keys() - buffers_of(module, state, whole_modules)
    changed = [
        name
        for name, buffer in module.named_buffers()
        if name in lost and not buffer.is_meta and not torch.equal(state.buffers[name].to(buffer), buffer)
    ]
    if changed:
        warn(
            f"adapters.save: training has changed buffers of the base, which files of peft do not hold: "
            f"{listed(changed)}. The adapters alone compute something else: save the base too (ft.to_module), or keep "
            "BatchNorm in eval mode"
        )


def load(directory: str | Path, step: Step, state: TrainState, *, any_base: bool = False) -> TrainState:
    """Return a state with the adapters that `save` or peft has written, and a new optimizer state.

    Every byte of files of `save` is verified; files of peft have no digests. Every rank of a step with `sharded` must
    call it, and reads the files; the result is divided over ranks as `state` is.

    Args:
        directory: directory with ``adapter_model.safetensors`` and ``adapter_config.json``.
        step: a step with `lora` of the same rank, alpha and targets; `like` makes the wrapper.
        state: a state of that step.
        any_base: also load adapters of another base, such as one that was trained further. Files of peft do not name
            their base by content, unless they contain its embedding.

    Raises:
        ComposeError: when the step has no `lora`.
        StructureError: when the adapters differ from those of the step, or were trained on another base; the message
            lists the differences.
        CheckpointError: when a file is missing, malformed or changed, or uses options of peft that are not supported.
        RankError: when another rank does not call it.
    """
    path, adapters = as_path("adapters.load", "directory", directory), _of_module("adapters.load", step, state)
    ranks = _ranks_with("adapters.load", step, state)
    content, named, bases = ranks.on_each(lambda: _read(path))
    params = state.params
    problems = _tied(named, bases, adapters.module)
    problems += [
        f"{theirs}: found {content.config.get(theirs)!r}, the step has {ours}={getattr(adapters.config, ours)!r}"
        for theirs, ours in OPTIONS.items()
        if (content.config.get(theirs) or 0) != getattr(adapters.config, ours)
    ]
    buffers = {name: leaf for name, leaf in (state.buffers or {}).items() if name in named}
    trained = {name: leaf for name, leaf in params.items() if leaf is not None}
    problems += _differences(named, {**trained, **buffers})
    if not any_base:
        problems += _other_base(content.metadata, bases, adapters, state)
    ranks.gather(lambda: _require_none(path, problems))
    loaded = {name: divided(named[name].to(leaf.dtype), like=leaf) for name, leaf in {**trained, **buffers}.items()}
    params = {name: loaded.get(name) for name in params}
    if buffers:
        state = replace(state, buffers={name: loaded.get(name, leaf) for name, leaf in state.buffers.items()})
    return replace(state, params=params, opt_state=step.optimizer.init(params), slots=step.init_slots(params))


def like(directory: str | Path) -> Wrapper:
    """Return the `lora` wrapper that the files of an adapter describe, so that a step with it can `load` them.

    Raises:
        CheckpointError: when a file is missing or malformed, or uses options of peft that ftrain does not support.
        OptionError: when an option in the file is not in its range.
    """
    content, named, _ = _read(as_path("adapters.like", "directory", directory))
    config = content.config
    targets = dict.fromkeys(escape(name.rpartition(".lora_")[0]) for name in named if ".lora_" in name)
    return lora(
        config.get("r", 0),
        config.get("lora_alpha"),
        targets=list(targets),
        dropout=config.get("lora_dropout") or 0.0,
        dora=bool(config.get("use_dora")),
        rslora=bool(config.get("use_rslora")),
    )


def _of_module(function: str, step: Step, state: TrainState) -> ModuleAdapters:
    adapters = adapters_of(function, step)
    if not isinstance(adapters, ModuleAdapters):
        raise StructureError(
            f"{function}: {step.base.text} is a loss of a tree, but peft's files are for modules; use "
            "ft.checkpoint.save(path, state.params)"
        )
    require_state(function, state)
    if SLOT in state.slots:
        raise StructureError(f"{function}: the adapters of this state are merged; use ft.adapters.unmerge first")
    require_adapters(function, adapters, state)
    return adapters


def _ranks_with(function: str, step: Step, state: TrainState) -> Ranks:
    """Return the ranks that must call a function together: those of the step or the state, or this one alone."""
    is_divided = any(map(dtensor.is_divided, tree.leaves((state.params, state.frozen))))
    return Ranks(function, alone=ranks_of(step.wrappers) == 1 and not is_divided)


def _peft_config(adapters: ModuleAdapters, whole_modules: list[str]) -> dict[str, Any]:
    config, names = adapters.config, [target.name for target in adapters.targets]
    names_of = defaultdict[nn.Module, list[str]](list)
    for name, part in adapters.module.named_modules(remove_duplicate=False):
        names_of[part].append(name)
    for target in adapters.targets:
        if not target.name:
            raise StructureError("adapters.save: the target is the model itself, but peft adapts only its submodules")
        if aliases := [name for name in names_of[target.part] if name != target.name]:
            raise StructureError(
                f"adapters.save: the module {target.name} is also {', '.join(aliases)}, but peft would adapt it under "
                "the first name only"
            )
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": _shortest(names, [name for name, _ in adapters.module.named_modules()]),
        "lora_dropout": config.dropout,
        "use_dora": config.dora,
        "use_rslora": config.rslora,
        "fan_in_fan_out": any(target.is_transposed and not target.is_embedding for target in adapters.targets),
        "bias": "none",
        "modules_to_save": whole_modules or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _shortest(names: list[str], every: list[str]) -> list[str] | str:
    """Return `names` in peft's form: ends of names, or a regular expression where ends match others of `every` too."""
    for ends in (sorted({name.rpartition(".")[2] for name in names}), sorted(names)):
        known = {*ends}
        if {name for name in every if not known.isdisjoint(_ends_of(name))} == set(names):
            return ends
    return "|".join(re.escape(name) for name in sorted(names))


def _ends_of(name: str) -> list[str]:
    """Return a dotted name and its ends, as ``["a.b.c", "b.c", "c"]``."""
    words = name.split(".")
    return [".".join(words[start:]) for start in range(len(words))]


def _wholes(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield the frozen parameters with their names. Those that are divided over ranks are gathered one by one."""
    for name, leaf in (state.frozen or {}).items():
        if leaf is not None:
            yield name, dtensor.whole(leaf)


def _has_fingerprint(whole: Tensor) -> bool:
    return whole.dtype in CODES and not _torch.is_wrapper_subclass(whole)


def _read(directory: Path) -> tuple[TensorsAndConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Return what is in the files, the trained tensors by their names in ftrain, and the weights of the base."""
    content = read_safetensors(directory, FILES)
    _require_options(directory, content.config)
    return content, *_named(directory, content)


def _require_none(directory: Path, problems: list[str]) -> None:
    if problems:
        raise StructureError(f"adapters.load: {directory} does not fit the step:{first_lines(problems)}")


def _require_options(directory: Path, config: Mapping[str, Any]) -> None:
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        raise CheckpointError(
            f"{directory}: peft_type is {peft_type!r}, which ft.lora does not support; train the "
            "model of peft itself: ft.from_module(peft_model)"
        )
    unsupported = [
        f"{name}={value!r}"
        for name, value in config.items()
        if value and name not in IGNORED and name not in OPTIONS and (name, value) != ("bias", "none")
        if name != "init_lora_weights" or value not in INITS
    ]
    if unsupported:
        raise CheckpointError(
            f"{directory}: {FILES[1]} has {', '.join(unsupported)}, which ft.lora does not support; merge the adapter "
            "with peft, train it without, or train the model of peft itself: ft.from_module(peft_model)"
        )


def _named(directory: Path, content: TensorsAndConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the trained tensors of a file by their names in ftrain, and the weights of the base that it has."""
    # Peft matches `modules_to_save` with the ends of names, also within a word.
    modules = [re.escape(name) for name in content.config.get("modules_to_save") or ()]
    trained = re.compile(rf"(.*\.)?lora_|.*({'|'.join(modules) or '$'})\.")
    named, bases = {}, {}
    for key, tensor in content.tensors.items():
        if not key.startswith(PREFIX):
            raise CheckpointError(f"{directory}: {FILES[0]} has {key}, which does not begin with {PREFIX}")
        name = key.removeprefix(PREFIX)
        if trained.match(name):
            named[name.removesuffix(".weight") if "lora_magnitude" in name else name] = tensor
        else:
            # Peft saves embeddings that have adapters, or are tied to one.
            bases[name.replace(".base_layer.", ".")] = tensor
    return named, bases


def _tied(named: dict[str, Tensor], bases: dict[str, Tensor], module: nn.Module) -> list[str]:
    """Keep trained weights that are tied in a module under their first name; return messages of those that differ."""
    problems = []
    both = {**bases, **named}
    for name, first in first_names(module).items():
        if name != first and named.keys() & {name, first}:
            values = [both[alias] for alias in (first, name) if alias in both]
            for alias in (first, name):
                named.pop(alias, None)
                bases.pop(alias, None)
            named[first] = values[0]
            if len(values) < 2 or not torch.equal(*values):
                problems.append(
                    f"{name}: trained apart from {first}, to which it is tied in {type(module).__name__}; give it a "
                    "weight of its own before ft.from_module"
                )
    return problems


def _differences(named: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> list[str]:
    """Return a message for each tensor of the files that is missing, unexpected, or of another shape than needed."""
    missing = [f"{name}: missing, needs {tree.describe(needed[name])}" for name in needed if name not in named]
    hint = "; it trained beside the adapters: name it in trainable="
    extra = [
        f"{name}: unexpected {tree.describe(named[name])}{'' if '.lora_' in name else hint}"
        for name in sorted(named.keys() - needed.keys())
    ]
    shapes = [
        f"{name}: found {list(named[name].shape)}, needs {list(needed[name].shape)}"
        for name in needed
        if name in named and named[name].shape != needed[name].shape
    ]
    return missing + extra + shapes


def _other_base(
    metadata: Mapping[str, str], bases: Mapping[str, Tensor], adapters: ModuleAdapters, state: TrainState
) -> list[str]:
    """Return a message if the base of a file differs from that of a state, as far as the file tells."""
    aliases = first_names(adapters.module)
    fingerprints = json.loads(metadata.get(FINGERPRINTS, "{}"))
    same = set[str]()
    different = list[str]()
    for name, whole in _wholes(state):
        same |= {alias for alias, theirs in bases.items() if aliases.get(alias) == name and _is_same(whole, theirs)}
        if name in fingerprints and _has_fingerprint(whole):
            ours, theirs = fingerprint(whole), fingerprints[name]
            # A base in another dtype may be the same; its fingerprints cannot be compared.
            if ours != theirs and ours.partition(":")[0] == theirs.partition(":")[0]:
                different.append(name)
    different += sorted(bases.keys() - same)
    if not different:
        return []
    names = different[0] if len(different) == 1 else f"{different[0]} and {len(different) - 1} more"
    return [f"it was trained on another base, with other values in {names}; any_base=True loads it anyway"]


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(theirs.to(ours), ours)
