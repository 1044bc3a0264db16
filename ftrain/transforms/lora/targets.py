"""The modules that get an adapter, and the names, initial values and slots of their adapters."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftrain import _torch, random, tree
from ftrain.errors import OptionError, StructureError
from ftrain.step.swap_params import Slot, bound, slots_of
from ftrain.transforms.lora.config import Config
from ftrain.transforms.lora.weights import adapter_dtype, kaiming, norms
from ftrain.tree.name_patterns import WILDCARDS, near

SUPPORTED = "nn.Linear, nn.Embedding and the Conv1D of transformers"
CONV1D = "transformers.pytorch_utils", "Conv1D"


@dataclass(frozen=True, eq=False)
class Target:
    """A module with an adapter, whose tensors have the names of peft's files.

    `weight` is the name of its weight among the parameters; if it is tied, it may be named after another module, and
    `tied_to` has its names there. `tensors` are those of the adapter while the module runs, else None.
    """

    config: Config
    name: str
    part: nn.Module
    weight: str
    tied_to: tuple[str, ...] = ()
    tensors: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("a", "b", "magnitude")))

    @property
    def tie(self) -> str:
        """A clause for messages: its weight, and the weights to which it is tied."""
        return f"{_weight_of(self.name)} is tied to {' and '.join(self.tied_to)}"

    @property
    def is_embedding(self) -> bool:
        """Whether it is an `nn.Embedding`."""
        return isinstance(self.part, nn.Embedding)

    @property
    def is_product(self) -> bool:
        """Whether the module computes a product with its weight; a subclass of `nn.Linear` may compute another thing.

        A subclass is run on fixed numbers in place of its parameters, which the state has.
        """
        part: Any = self.part
        if not isinstance(part, nn.Linear) or type(part).forward is nn.Linear.forward:
            return True
        slots = slots_of(part)
        params = {slot.name: _numbers(slot.tensors[slot.key].shape) for slot in slots if not slot.is_buffer}
        x = _numbers(torch.Size((2, part.in_features))).flip(1)
        try:
            with bound(slots, [params.get(slot.name, slot.tensors[slot.key]) for slot in slots]), torch.no_grad():
                result = part.forward(x)
        except Exception:  # Whatever it needs, it is more than its input.
            return False
        expected = F.linear(x, params["weight"], params.get("bias"))
        return isinstance(result, Tensor) and result.shape == expected.shape and torch.allclose(result, expected)

    @property
    def is_transposed(self) -> bool:
        """Whether its weight is (inputs, outputs), which peft calls `fan_in_fan_out`."""
        return not isinstance(self.part, nn.Linear)

    def matrix(self, weight: Tensor) -> Tensor:
        """Transpose a weight to (outputs, inputs), or such a matrix back to a weight, if the module needs it."""
        return weight.T if self.is_transposed else weight

    @property
    def names(self) -> dict[str, str]:
        """The names of the tensors `a`, `b` and with DoRA `magnitude`."""
        a, b = ("embedding_A", "embedding_B") if self.is_embedding else ("A.weight", "B.weight")
        owner = f"{self.name}." if self.name else ""
        names = {"a": f"{owner}lora_{a}", "b": f"{owner}lora_{b}"}
        return {**names, "magnitude": f"{owner}lora_magnitude_vector"} if self.config.dora else names

    @property
    def slots(self) -> list[Slot]:
        """The slots of its tensors."""
        return [Slot(self.tensors, key, name, False) for key, name in self.names.items()]

    def initial(self, weight: Tensor, key: Tensor) -> dict[str, Tensor]:
        """Return the initial tensors by name; with them the module computes the same as without the adapter.

        Raises a StructureError for DoRA on a weight with a row of zeros. Waits for the device to look for one.
        """
        config = self.config
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
            self._require_no_zero(tensors["magnitude"])
        return {name: tensors[kind] for kind, name in self.names.items()}

    def _require_no_zero(self, magnitude: Tensor) -> None:
        """Waits for the device, to read whether a norm is 0. Raises a StructureError if so."""
        if magnitude.is_meta or _torch.is_fake(magnitude):
            return
        zeros = int(magnitude.eq(0).sum())
        if zeros:
            raise StructureError(
                "lora: dora divides by the norm of the weights of each output, which is 0 in "
                f"{_weight_of(self.name)} for {zeros} of {len(magnitude)} outputs, so the loss "
                "would be NaN; leave it out of targets, or use lora without dora"
            )


def find_targets(module: nn.Module, config: Config) -> list[Target]:
    """Return the modules to adapt: those of a supported class whose names match a pattern of the options.

    Raises an OptionError for a pattern that matches none, with similar names, and for a weight of integers.
    """
    parts = dict(module.named_modules())
    # Torch's attention reads the weights of its output layer without calling it, so an adapter would not run.
    never_called = {id(part.out_proj) for part in parts.values() if isinstance(part, nn.MultiheadAttention)}
    adaptable = {name: part for name, part in parts.items() if _is_adaptable(part) and id(part) not in never_called}
    chosen: set[str] = set()
    for pattern in config.targets:
        # A name by itself is looked up: `adapters.like` names thousands.
        if WILDCARDS.isdisjoint(pattern):
            matches = adaptable.keys() & {pattern}
        else:
            matches = {name for name in adaptable if fnmatchcase(name, pattern)}
        if not matches:
            raise OptionError(
                f"lora: targets names {pattern!r}, and no module of {type(module).__name__} that matches can have an "
                f"adapter; {SUPPORTED} can, by their weights: {near(pattern, list(adaptable)) or 'there are none'}"
            )
        chosen.update(matches)
    for name in chosen:
        _require_float_weight(name, _torch.parameters_of(adaptable[name])["weight"])
    # The identity of a parameter -> all its names; a tied one has several.
    names_of = defaultdict[int, list[str]](list)
    for name, part in parts.items():
        for key, tensor in _torch.parameters_of(part).items():
            names_of[id(tensor)].append(f"{name}.{key}" if name else key)
    targets = []
    for name, part in adaptable.items():
        if name in chosen:
            weight_names = names_of[id(_torch.parameters_of(part)["weight"])]
            tied_to = tuple(other for other in weight_names if other != _weight_of(name))
            targets.append(Target(config, name, part, weight_names[0], tied_to))
    return targets


def _numbers(shape: torch.Size) -> Tensor:
    return torch.arange(1.0, shape.numel() + 1, dtype=torch.float64).sin().view(shape)


def _require_float_weight(name: str, weight: Tensor | None) -> None:
    if weight is None or weight.is_floating_point():
        return
    text = f"lora: the weight of {name or 'the module'} is {tree.describe(weight)}"
    if weight.is_complex():
        raise OptionError(
            f"{text}, and adapters are real: they would read its real part alone; leave it out of targets"
        )
    raise OptionError(
        f"{text}, bits that its class alone can read, as those of bitsandbytes; quantise the base with torchao "
        "instead: torchao.quantization.quantize_"
    )


def _is_adaptable(part: nn.Module) -> bool:
    weight = _torch.parameters_of(part).get("weight")
    if weight is None or weight.ndim != 2:
        return False
    if isinstance(part, nn.Embedding):
        # A subclass may compute something else, and `max_norm` changes the weight.
        return type(part).forward is nn.Embedding.forward and part.max_norm is None
    return isinstance(part, nn.Linear) or (type(part).__module__, type(part).__name__) == CONV1D


def _weight_of(module: str) -> str:
    """Return the name of the weight of a module, given the name of the module, which is empty for the whole model."""
    return f"{module}.weight" if module else "weight"
