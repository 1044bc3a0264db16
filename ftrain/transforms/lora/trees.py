"""The adapters of the matrices of a tree, which are added to these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import tree
from ftrain.errors import LossError, OptionError
from ftrain.optim.partial_update import require_unique
from ftrain.step.swap_params import Slot
from ftrain.transforms.lora.config import Config, keys_of, missing
from ftrain.transforms.lora.weights import adapted, adapter_dtype, kaiming
from ftrain.tree.name_patterns import as_select, require_matches
from ftrain.types import Loss, LossFn, LossOutput, PyTree

BASE, ADAPTERS = "base", "adapters"


class TreeAdapters:
    """The adapters of a tree; `text` is that of its loss. Raises an OptionError for an option that needs a module."""

    def __init__(self, config: Config, text: str) -> None:
        self.config = config
        # The inputs of a matrix are not known, and neither is which of its axes are outputs.
        if config.dropout or config.dora:
            raise OptionError(
                f"lora: dropout and dora are for modules, and {text} is a loss of a tree, where an adapter is added to "
                "a matrix. Leave them out, or use ft.from_module"
            )

    def slots(self, part: nn.Module) -> list[Slot]:
        """Return no slots: there is no module."""
        return []

    def added(self, params: PyTree, frozen: PyTree, key: Tensor) -> tuple[PyTree, PyTree]:
        """Return the trainable and the frozen parameters with new adapters, drawn from a key, among the trainable.

        Raises an OptionError for a pattern that matches no matrix, and a ComposeError if two leaves have one name.
        """
        chosen = self._chosen(tree.overlay(params, frozen))
        adapters = {}
        for (name, leaf), leaf_key in zip(chosen.items(), keys_of(key, len(chosen)), strict=True):
            a = kaiming(leaf_key, self.config.rank, leaf.shape[1], leaf)
            b = torch.zeros(leaf.shape[0], self.config.rank, dtype=adapter_dtype(leaf), device=leaf.device)
            adapters[name] = {"A": a, "B": b}
        return {BASE: params, ADAPTERS: adapters}, {BASE: frozen, ADAPTERS: tree.map(lambda leaf: None, adapters)}

    def _chosen(self, base: PyTree) -> dict[str, Tensor]:
        """Return the matrices that get an adapter, by name."""
        names = tree.leaf_names(base)
        require_unique("lora", "parameters", names)
        named = dict(zip(names, tree.leaves(base), strict=True))
        tensors = {name: leaf for name, leaf in named.items() if tree.is_tensor(leaf)}
        # An adapter would be cut to whole numbers in a table of indices, and a complex matrix to its real part.
        matrices = {name: leaf for name, leaf in tensors.items() if leaf.ndim == 2 and leaf.is_floating_point()}
        if not matrices:
            raise OptionError(
                "lora: the parameters have no floating-point leaf with two axes; only those can have an adapter"
            )
        select = as_select("lora: targets", self.config.targets)
        require_matches(select, matrices)
        return {name: leaf for name, leaf in matrices.items() if select(name, leaf)}

    def around(self, loss: Loss) -> LossFn:
        """Return the loss of the tree with its adapters; it raises a LossError when these are not in the parameters."""

        def fn(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            if not isinstance(params, dict) or params.keys() != {BASE, ADAPTERS}:
                raise LossError(missing(loss.text, ADAPTERS))
            return loss.fn(self.added_up(params), batch, rng=rng, buffers=buffers)

        return fn

    def added_up(self, params: PyTree, *, sign: int = 1, add: Callable[..., Tensor] = adapted) -> PyTree:
        """Return the tree with its adapters added by ``add(weight, a, b, scale)``, or subtracted with the sign -1."""
        adapters, scale = params[ADAPTERS], sign * self.config.scale

        def with_adapter(name: str, leaf: Any) -> Any:
            if name not in adapters:
                return leaf
            return add(leaf, adapters[name]["A"], adapters[name]["B"], scale).to(leaf.dtype)

        return tree.map_named(with_adapter, params[BASE])
