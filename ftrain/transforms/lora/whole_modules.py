"""The parameters that train besides adapters, as the whole modules that peft saves and loads (`modules_to_save`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from torch import Tensor, nn

from ftrain.errors import StructureError
from ftrain.transforms.lora.modules import ModuleAdapters
from ftrain.types import TrainState

CLASSIFIERS = "classifier", "score"
HEADS = {"SEQ_CLS": CLASSIFIERS, "TOKEN_CLS": CLASSIFIERS, "QUESTION_ANS": ("qa_outputs",)}
"""Values of `task_type` -> what peft adds to `modules_to_save`."""
CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
"""Classes that have no forward, which peft refuses in `modules_to_save`."""
OF_PEFT = "base_layer", "lora_dropout", "lora_dropout.default", "lora_A", "lora_B", "lora_magnitude_vector"
"""Modules that peft makes within a target, where it looks for `modules_to_save` too."""


def whole_modules_of(adapters: ModuleAdapters, others: Set[str], task_type: str | None) -> list[str]:
    """Return the outermost modules in which all parameters train, which are `others`.

    Raises a StructureError if one of `others` is in no such module, or peft would look for another module in the files.
    """
    names = first_names(adapters.module)
    parts = dict(adapters.module.named_modules(remove_duplicate=False))
    # By the name of a module: how many parameters it has, and how many of `others`.
    sizes = Counter(around for name in (*names, *adapters.names) for around in _modules_around(name))
    trained = Counter(around for name, first in names.items() if first in others for around in _modules_around(name))
    uses = Counter(names.values())
    owners = set[str]()
    peft_names = [*sizes, *(f"{target.name}.{part}" for target in adapters.targets for part in OF_PEFT)]
    wholes = {each for each in sizes if trained[each] == sizes[each] and not isinstance(parts[each], CONTAINERS)}
    for name in others:
        around = _modules_around(name)
        owners.add(next((each for each in around if each in wholes), around[-1] if around else ""))
    for owner in sorted(owners):
        inside = sorted(name for name in names if owner in _modules_around(name))
        problem = ""
        if not owner:
            problem = "which are of no submodule"
        elif frozen := [name for name in inside if names[name] not in others]:
            problem = f"and {frozen[0]} is frozen"
        elif trained[owner] < sizes[owner]:
            problem = "and have adapters too"
        elif shared := [name for name in inside if uses[names[name]] > 1]:
            problem = f"and {shared[0]} is tied to another module's"
        elif isinstance(parts[owner], CONTAINERS):
            problem = f"and peft saves no {type(parts[owner]).__name__}"
        elif also := [name for name in peft_names if name.endswith(owner) and name not in owners]:
            problem = f"and peft would take {also[0]} for it"
        if problem:
            raise StructureError(
                f"adapters.save: parameters of {owner or 'the model'} train, {problem}; beside adapters peft saves "
                "whole modules only (modules_to_save). Train the whole of it, or none, or use ft.checkpoint.save"
            )
    if heads := [name for name in sizes if name.endswith(HEADS.get(task_type or "", ())) and name not in owners]:
        raise StructureError(
            f"adapters.save: with task_type={task_type!r} peft needs all of {heads[0]} in the files, which is not "
            f"trained as a whole: train it (trainable=['{heads[0]}.*']), or leave out task_type"
        )
    return sorted(owners)


def first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by all its names: a tied one has several."""
    first = {id(param): name for name, param in module.named_parameters()}
    return {name: first[id(param)] for name, param in module.named_parameters(remove_duplicate=False)}


def _modules_around(name: str) -> list[str]:
    """Return the names of the modules around a parameter, the outermost first."""
    modules = name.split(".")[:-1]
    return [".".join(modules[:length]) for length in range(1, len(modules) + 1)]


def buffers_of(module: nn.Module, state: TrainState, whole_modules: Iterable[str]) -> dict[str, Tensor]:
    """Return the buffers of a state that belong to modules which are saved whole."""
    buffers = state.buffers or {}
    prefixes = tuple(f"{name}." for name in whole_modules)
    return {name: buffers[name] for name in module.state_dict() if name in buffers and name.startswith(prefixes)}
