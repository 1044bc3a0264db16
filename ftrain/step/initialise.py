"""Initialise a module on the device meta with its own initialisers, one block at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ftrain import _torch, random, tree
from ftrain._torch import operations
from ftrain.checkpoint.lazy_safetensors import StoredTensor
from ftrain.errors import StructureError, listed
from ftrain.step.blocks import repeated_children
from ftrain.step.swap_params import Slot, preserve_attributes, slots_of

_META = torch.device("meta")

_Initialiser: TypeAlias = Callable[[nn.Module], object]


def initialised(
    module: nn.Module, seed: int, device: torch.device, stored: Mapping[str, StoredTensor]
) -> Iterator[dict[str, Any]]:
    """Yield the parameters and buffers of a module by name: those of each block in turn, then the others.

    Tensors on the device meta are allocated on `device`. ``reset_parameters()`` of the modules inside and around a
    block writes their values, children first, and then ``_init_weights(part)`` of the nearest module around each part
    that has this method, as the models of transformers do. Other tensors are copied. The module is not changed.

    The random numbers depend only on the seed, the module and the type of the device. Tensors that are `stored` are
    yielded instead of initialised ones. Raises a StructureError if no initialiser writes a tensor, or a random
    operation takes no generator.
    """
    slots, key = slots_of(module), random.key_data(random.key(seed))
    # Of a tied tensor, the first slot counts.
    first_slots = list({slot.name: slot for slot in reversed(slots)}.values())[::-1]
    initialisers = dict(_with_initialisers(module, None))
    for number, unit in enumerate(_units(module)):
        dicts = {id(tensors) for part in unit for tensors in (_torch.parameters_of(part), _torch.buffers_of(part))}
        tensors: dict[str, Any] = {
            slot.name: slot.tensors[slot.key] for slot in first_slots if id(slot.tensors) in dicts
        }
        created = {name for name, tensor in tensors.items() if tensor.is_meta} - stored.keys()
        if created:
            members = set(unit)
            drawing = _Drawing(random.seed_of(random.fold_in_key_data(key, number)))
            around = [part for part in module.modules() if part in members or unit[0] in set(part.modules())]
            with preserve_attributes(module), torch.no_grad(), drawing:
                for slot in slots:
                    has_memory = id(slot.tensors) in dicts and slot.name not in stored
                    slot.tensors[slot.key] = drawing.watched(_copy(slot, device if has_memory else _META))
                # Children come before the modules around them.
                for part in reversed(around):
                    _initialise(part, initialisers.get(part))
                tensors |= {slot.name: slot.tensors[slot.key] for slot in first_slots if slot.name in created}
            _require_written(module, [name for name in created if not drawing.has_written(tensors[name])])
        kept = tensors.keys() - created - stored.keys()
        yield {
            name: stored[name] if name in stored else tensor.detach().clone() if name in kept else tensor.detach()
            for name, tensor in tensors.items()
        }


def _units(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the modules within each block, then those outside of blocks, the outermost first."""
    seen: set[nn.Module] = set()
    for block in repeated_children(module):
        unit = [part for part in block.modules() if part not in seen]
        seen.update(unit)
        if unit:
            yield unit
    yield [part for part in module.modules() if part not in seen]


def _with_initialisers(
    part: nn.Module, initialiser: _Initialiser | None
) -> Iterator[tuple[nn.Module, _Initialiser | None]]:
    """Yield each module with the method ``_init_weights(part)`` of the nearest module around it that has one."""
    method = getattr(part, "_init_weights", None)
    if callable(method) and len(inspect.signature(method).parameters) == 1:
        initialiser = method
    yield part, initialiser
    for child in part.children():
        yield from _with_initialisers(child, initialiser)


def _initialise(part: nn.Module, initialiser: _Initialiser | None) -> None:
    # `nn.MultiheadAttention` and `nn.Transformer` have the name with an underscore.
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if reset is not None:
        reset()
    if initialiser is not None:
        initialiser(part)


def _copy(slot: Slot, device: torch.device) -> Tensor:
    """Return a copy of the tensor in a slot on a device; without values if one of them is on meta."""
    tensor: Tensor = slot.tensors[slot.key]
    is_empty = tensor.is_meta or device.type == _META.type
    copy = torch.empty_like(tensor, device=device) if is_empty else tensor.detach().clone()
    return copy if slot.is_buffer else nn.Parameter(copy, tensor.requires_grad)


def _require_written(module: nn.Module, names: Sequence[str]) -> None:
    if not names:
        return
    owner = type(module.get_submodule(names[0].rpartition(".")[0])).__name__
    raise StructureError(
        f"Step.init: {listed(names)} of {type(module).__name__} have no values: they are on the device meta, and no "
        f"reset_parameters() of {owner} or a module around it writes them. Add a method reset_parameters() to {owner} "
        "that fills them, create them outside of torch.device('meta'), or read them from a file: "
        "step.init('model.safetensors')"
    )


class _Drawing(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which random operations draw from generators of this object. It records which tensors are written."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._unwritten: dict[int, Tensor] = {}

    def watched(self, tensor: Tensor) -> Tensor:
        """Return the tensor, for which `has_written` can then be called."""
        self._unwritten[_torch.storage_id(tensor)] = tensor
        return tensor

    def has_written(self, tensor: Tensor) -> bool:
        """Whether a tensor has values: it was written after the call of `watched`, or an initialiser replaced it."""
        return not tensor.numel() or _torch.storage_id(tensor) not in self._unwritten

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation, with a generator if it draws random numbers."""
        kwargs = kwargs or {}
        parameters = operations.schema_of(func).arguments
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            func = _with_generator(func)
            kwargs = {**kwargs, "generator": self._generator(args, kwargs)}
        arguments = dict(zip((parameter.name for parameter in parameters), args, strict=False)) | kwargs
        for parameter in parameters:
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                for tensor in tree.leaves(arguments.get(parameter.name)):
                    self._unwritten.pop(_torch.storage_id(tensor), None)
        return func(*args, **kwargs)

    def _generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
        tensor = next((value for value in args if isinstance(value, Tensor)), None)
        device = kwargs.get("device") or (torch.get_default_device() if tensor is None else tensor.device)
        device = tree.HOST if device.type == "meta" else device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _with_generator(func: Any) -> Any:
    """Return the overload of a random operation that takes a generator."""
    if any(parameter.name == "generator" for parameter in operations.schema_of(func).arguments):
        return func
    overload = func.name().partition(".")[2]
    seeded = getattr(func.overloadpacket, f"{overload}_generator" if overload else "generator", None)
    if seeded is None:
        raise StructureError(
            f"Step.init: {func}, called to initialise a module on the device meta, draws from a global generator and "
            "takes no other one; fill tensors with methods such as normal_() and uniform_()"
        )
    return seeded
