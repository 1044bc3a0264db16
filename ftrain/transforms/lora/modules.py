"""The adapters of a module, which run in the forward of its submodules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ftrain import tree
from ftrain.errors import LossError, StructureError
from ftrain.step.blocks import forwarding
from ftrain.step.swap_params import Slot, bound
from ftrain.transforms.lora import layers
from ftrain.transforms.lora.config import Config, keys_of, missing
from ftrain.transforms.lora.targets import find_targets
from ftrain.types import Loss, LossFn, LossOutput, PyTree


class ModuleAdapters:
    """The adapters of a module.

    Args:
        config: their options.
        module: the base.

    Raises:
        OptionError: for a pattern of targets that matches nothing.
    """

    def __init__(self, config: Config, module: nn.Module) -> None:
        self.config, self.module, self.targets = config, module, find_targets(module, config.targets)
        self._forwards = {id(target.part): layers.forward(target, config) for target in self.targets}
        self._slots = {id(target.part): target.slots(dora=config.dora) for target in self.targets}
        self._places = [slot for slots in self._slots.values() for slot in slots]
        self.names = {slot.name for slot in self._places}
        # In evaluation, fused layers of torch read the weights of their submodules, and do not call these.
        fused = nn.TransformerEncoder, nn.TransformerEncoderLayer
        self._may_fuse = any(isinstance(part, fused) for part in module.modules())

    def slots(self, part: nn.Module) -> list[Slot]:
        """Return the places of the adapters in a part of the module."""
        return [slot for inner in part.modules() for slot in self._slots.get(id(inner), ())]

    def added(self, params: PyTree, frozen: PyTree, key: Tensor) -> tuple[PyTree, PyTree]:
        """Return some parameters with their new adapters, which are trainable, drawn from a key.

        Raises:
            StructureError: when a parameter has the name of one of them.
        """
        base = tree.overlay(params, frozen)
        if existing := sorted(self.names & base.keys()):
            raise StructureError(f"lora: {existing[0]} is a parameter already; start from a base without adapters")
        adapters: dict[str, Tensor] = {}
        for target, each in zip(self.targets, keys_of(key, len(self.targets)), strict=True):
            if target.weight in base:
                adapters.update(target.initial(base[target.weight], each, self.config))
        return {**params, **adapters}, {**frozen, **dict.fromkeys(adapters)}

    def around(self, loss: Loss) -> LossFn:
        """Return the loss of the base with its adapters; it raises a LossError for parameters without adapters."""

        def fn(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            try:
                values = [params[slot.name] for slot in self._places]
            except KeyError as error:
                raise LossError(missing(loss.text, error.args[0])) from None
            base = {name: leaf for name, leaf in params.items() if name not in self.names}
            with bound(self._places, values):
                return loss.fn(base, batch, rng=rng, buffers=buffers)

        return fn

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the modules that have adapters run with them."""
        fuses = self._may_fuse and torch.backends.mha.get_fastpath_enabled()
        with forwarding((target.part, self._forwards[id(target.part)]) for target in self.targets):
            try:
                if fuses:
                    torch.backends.mha.set_fastpath_enabled(False)
                yield
            finally:
                if fuses:
                    torch.backends.mha.set_fastpath_enabled(True)
