"""The adapters of a module, which run in the forward of its linear layers and embeddings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ftrain import tree
from ftrain.errors import LossError, StructureError, warn
from ftrain.step.blocks import forwarding
from ftrain.step.swap_params import Borrowed, Slot, preserve_dicts, put
from ftrain.transforms.lora.config import Config, keys_of, missing
from ftrain.transforms.lora.targets import Target, find_targets
from ftrain.transforms.lora.weights import norms
from ftrain.types import Loss, LossFn, LossOutput, PyTree


class ModuleAdapters:
    """The adapters of a module. Raises an OptionError for a pattern of targets that matches nothing."""

    def __init__(self, config: Config, module: nn.Module) -> None:
        self.config, self.module, self.targets = config, module, find_targets(module, config)
        self._forwards = [
            (target.part, _embedding(target) if target.is_embedding else _linear(target)) for target in self.targets
        ]
        self._slots = {id(target.part): target.slots for target in self.targets}
        self._all_slots = [slot for slots in self._slots.values() for slot in slots]
        self._borrowed = Borrowed([target.tensors for target in self.targets])
        self.names = {slot.name for slot in self._all_slots}
        # In evaluation, torch's fused layers read the weights of their submodules without calling them.
        fused = nn.TransformerEncoder, nn.TransformerEncoderLayer
        self._may_fuse = any(isinstance(part, fused) for part in module.modules())

    def slots(self, part: nn.Module) -> list[Slot]:
        """Return the slots of the adapters in a submodule."""
        return [slot for inner in part.modules() for slot in self._slots.get(id(inner), ())]

    def added(self, params: PyTree, frozen: PyTree, key: Tensor) -> tuple[PyTree, PyTree]:
        """Return the trainable and the frozen parameters, with new adapters, drawn from a key, among the trainable.

        Warns of a tied weight, which `ftrain.adapters.merge` refuses. Raises a StructureError when a parameter has the
        name of an adapter.
        """
        base = tree.overlay(params, frozen)
        existing = sorted(self.names & base.keys())
        if existing:
            raise StructureError(f"lora: {existing[0]} is a parameter already; start from a base without adapters")
        adapters: dict[str, Tensor] = {}
        for target, target_key in zip(self.targets, keys_of(key, len(self.targets)), strict=True):
            if target.weight in base:
                _warn_of_tie(target)
                adapters.update(target.initial(base[target.weight], target_key))
        return {**params, **adapters}, {**frozen, **dict.fromkeys(adapters)}

    def around(self, loss: Loss) -> LossFn:
        """Return the loss of the base with its adapters; it raises a LossError when these are not in the parameters."""

        def fn(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            try:
                values = [params[slot.name] for slot in self._all_slots]
            except KeyError as error:
                raise LossError(missing(loss.text, error.args[0])) from None
            base = {name: leaf for name, leaf in params.items() if name not in self.names}
            with preserve_dicts(self._borrowed.dicts) if is_dynamo_compiling() else self._borrowed:
                put(self._all_slots, values)
                return loss.fn(base, batch, rng=rng, buffers=buffers)

        return fn

    def on_compiled(self, loss: Loss, compiled: LossFn) -> LossFn:
        """Return what `Loss.on_compiled` returns, for a loss of the base with its adapters."""
        return self._borrowed.kept_from(loss.on_compiled(compiled), self._all_slots)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the target modules run with their adapters."""
        with forwarding(self._forwards), _UNFUSED if self._may_fuse else nullcontext():
            self._borrowed.steps += 1
            try:
                yield
            finally:
                self._borrowed.steps -= 1
                if self._borrowed.steps == 0:
                    self._borrowed.restore()


class _Unfused:
    """Context without torch's fused layers. Their switch is of the process: it stays off while any thread is in it."""

    def __init__(self) -> None:
        self._lock, self._inside, self._was_on = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_on = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.mha.set_fastpath_enabled(self._was_on)


_UNFUSED = _Unfused()


def _warn_of_tie(target: Target) -> None:
    if target.tied_to:
        warn(
            f"lora: {target.tie}, which does not get the adapter of {target.name}: ft.adapters.merge will refuse the "
            f"state. To merge it, give {target.name} a weight of its own before ft.from_module: {target.name}.weight = "
            f"torch.nn.Parameter({target.name}.weight.detach().clone()). Training, evaluation of step.loss and "
            "ft.adapters.save need nothing"
        )


def _linear(target: Target) -> Callable[..., Tensor]:
    """Return the forward of a linear layer with its adapter, whose tensors are in ``target.tensors`` while it runs."""
    part: Any = target.part
    tensors, base, config = target.tensors, part.forward, target.config
    scale, rate = config.scale, config.dropout

    def linear(*args: Any, **kwargs: Any) -> Tensor:
        x, *more = [*args, *kwargs.values()]  # Torch calls the first `input`, and the Conv1D of transformers `x`.
        result: Tensor = base(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise LossError(
                f"lora: {target.name or 'the module'} ({type(part).__name__}) returns {tree.describe(result)}, to "
                "which no adapter can be added: leave it out of targets"
            )
        a, b = tensors["a"], tensors["b"]
        has_dropout = bool(rate) and part.training
        inputs = x.to(a.dtype)
        if has_dropout:
            inputs = F.dropout(inputs, rate)
        # Scaled where it has the fewest elements: the rank per example.
        product = F.linear(F.linear(inputs, a) * scale, b)
        if not config.dora:
            return (result + product).to(result.dtype)
        ratio: Tensor = tensors["magnitude"] / norms(target.matrix(part.weight), a, b, scale)
        # The ratio also scales the product with the weight, for the same inputs after dropout, but not the bias.
        base_product = base(inputs.to(x.dtype), *more) if has_dropout else result
        if part.bias is not None:
            base_product = base_product - part.bias
        return (result + (ratio - 1) * base_product + ratio * product).to(result.dtype)

    return linear


def _embedding(target: Target) -> Callable[..., Tensor]:
    """As `_linear`, for an embedding."""
    part: Any = target.part
    tensors, base, scale = target.tensors, part.forward, target.config.scale

    def embedding(*args: Tensor, **kwargs: Tensor) -> Tensor:
        (indices,) = *args, *kwargs.values()
        result: Tensor = base(indices)
        a, b = tensors["a"], tensors["b"]
        rows = F.embedding(indices, a.T, part.padding_idx, scale_grad_by_freq=part.scale_grad_by_freq)
        product: Tensor = (rows * scale) @ b.T
        if not target.config.dora:
            return (result + product).to(result.dtype)
        ratio: Tensor = tensors["magnitude"] / norms(target.matrix(part.weight), a, b, scale)
        return (ratio * (result + product)).to(result.dtype)

    return embedding
