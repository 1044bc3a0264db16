"""Which modules get an adapter, and of what its tensors are called, how they begin and where they lie meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import _torch, random
from ftrain.errors import OptionError
from ftrain.step.swap_params import Slot, slots_of
from ftrain.transforms.lora.config import Config
from ftrain.transforms.lora.weights import adapter_dtype, kaiming, norms
from ftrain.tree.name_patterns import near

SUPPORTED = "nn.Linear, nn.Embedding and the Conv1D of transformers"
CONV1D = "transformers.pytorch_utils", "Conv1D"


@dataclass(frozen=True, eq=False)
class Target:
    """A module with an adapter, whose tensors have the names that they have in the files of peft.

    Args:
        name: dotted name of the module.
        part: the module.
        weight: the name of its weight among the parameters, another module's where the two are tied.
        tied: whether the weight is another module's too.
        aliases: further names of the module.
        held: where its tensors are while the module runs on them.
    """

    name: str
    part: nn.Module
    weight: str
    tied: bool
    aliases: tuple[str, ...] = ()
    held: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("a", "b", "magnitude")))

    @property
    def is_embedding(self) -> bool:
        """Whether it looks its inputs up."""
        return isinstance(self.part, nn.Embedding)

    @property
    def is_transposed(self) -> bool:
        """Whether its weight is (inputs, outputs), which peft calls `fan_in_fan_out`."""
        return not isinstance(self.part, nn.Linear)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a weight as (outputs, inputs), or a matrix of that shape as a weight."""
        return weight.T if self.is_transposed else weight

    def names(self, *, dora: bool) -> dict[str, str]:
        """Return the names of its tensors by what they are: `a`, `b` and with DoRA `magnitude`."""
        a, b = ("embedding_A", "embedding_B") if self.is_embedding else ("A.weight", "B.weight")
        owner = f"{self.name}." if self.name else ""
        found = {"a": f"{owner}lora_{a}", "b": f"{owner}lora_{b}"}
        return {**found, "magnitude": f"{owner}lora_magnitude_vector"} if dora else found

    def slots(self, *, dora: bool) -> list[Slot]:
        """Return the places of its tensors."""
        return [Slot(self.held, key, name, False) for key, name in self.names(dora=dora).items()]

    def initial(self, weight: Tensor, key: Tensor, config: Config) -> dict[str, Tensor]:
        """Return its first tensors, by name, with which the module computes what it did without."""
        matrix = self.matrix(weight.detach())
        outputs, inputs = matrix.shape
        options: dict[str, Any] = {"dtype": adapter_dtype(weight), "device": weight.device}
        if self.is_embedding:
            key = random.to_device(key, weight.device)
            b = random.normal(key, (outputs, config.rank), dtype=options["dtype"])
            tensors = {"a": torch.zeros(config.rank, inputs, **options), "b": b}
        else:
            a = kaiming(key, config.rank, inputs, weight)
            tensors = {"a": a, "b": torch.zeros(outputs, config.rank, **options)}
        if config.dora:
            tensors["magnitude"] = norms(matrix, tensors["a"], tensors["b"], config.scale)
        return {name: tensors[kind] for kind, name in self.names(dora=config.dora).items()}


def find_targets(module: nn.Module, patterns: Sequence[str]) -> list[Target]:
    """Return the modules to adapt: those of a kind that can be, whose names match a pattern.

    Raises:
        OptionError: for a pattern that matches none; the message has names that are near.
    """
    parts = dict(module.named_modules())
    able = {name: part for name, part in parts.items() if _is_able(part)}
    for unused in _unused(module):
        able = {name: part for name, part in able.items() if part is not unused}
    for pattern in patterns:
        if not _matching(pattern, able):
            raise OptionError(_unmatched(module, pattern, parts, able))
    chosen = {name for pattern in patterns for name in _matching(pattern, able)}
    places = slots_of(module)
    names = {(id(slot.place), slot.key): slot.name for slot in places}
    uses = [slot.name for slot in places]
    aliases: dict[int, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        aliases.setdefault(id(part), []).append(name)
    found = []
    for name in (name for name in able if name in chosen):
        part = able[name]
        weight = names[id(_torch.parameters_of(part)), "weight"]
        found.append(Target(name, part, weight, uses.count(weight) > 1, tuple(aliases[id(part)][1:])))
    return found


def _is_able(part: nn.Module) -> bool:
    weight = _torch.parameters_of(part).get("weight")
    if weight is None or weight.ndim != 2:
        return False
    if isinstance(part, nn.Embedding):
        # One that scales what it looks up, or writes its own weight, computes something else than rows.
        return type(part).forward is nn.Embedding.forward and part.max_norm is None
    return isinstance(part, nn.Linear) or (type(part).__module__, type(part).__name__) == CONV1D


def _unused(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose forward is never called: torch's attention reads the weights of its output layer."""
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention):
            yield part.out_proj


def _matching(pattern: str, names: Any) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _unmatched(module: nn.Module, pattern: str, parts: dict[str, nn.Module], able: dict[str, nn.Module]) -> str:
    said = f"lora: targets names {pattern!r}, and no module of {type(module).__name__} "
    if found := _matching(pattern, parts):
        kinds = sorted({type(parts[name]).__name__ for name in found})
        return f"{said}that matches can have an adapter ({', '.join(kinds)}); {SUPPORTED} can, by their weights"
    if not able:
        return f"{said}can have an adapter; {SUPPORTED} can"
    hint = f" Did you mean {'*.' + pattern!r}?" if _matching("*." + pattern, able) else ""
    return f"{said}matches; there are {near(pattern, list(able))}.{hint}"
