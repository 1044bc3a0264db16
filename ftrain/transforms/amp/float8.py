"""Matrix multiplications in float8, by torchao, in the linear layers of a module."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import _torch
from ftrain.errors import ComposeError, FtrainError, OptionError
from ftrain.step.blocks import forwarding
from ftrain.step.swap_params import Slot, bound
from ftrain.step.wrapper import extend_scope
from ftrain.types import Loss

NAME = "with_amp(fp8)"
MULTIPLE = 16
"""The sizes of a float8 matmul must be multiples of this."""


def require_torchao() -> None:
    """Check that torchao is installed and can be imported, without importing it. Raises an FtrainError if not."""
    if importlib.util.find_spec("torchao") is None:
        raise FtrainError(f"{NAME}: needs torchao, which is not installed: pip install 'torchao>=0.18'")
    if not torch.distributed.is_available():
        raise FtrainError(f"{NAME}: torchao needs torch.distributed, without which this torch was built; use bf16")


def in_float8(loss: Loss) -> Loss:
    """Return a loss whose module multiplies in float8 in its `float8_layers`.

    Raises an OptionError if it has no such layers, and a ComposeError if it has adapters.
    """
    if loss.module is None:
        raise OptionError(f"{NAME}: {loss.text} has no module in which to find layers; use ft.from_module, or bf16")
    if loss.adapters is not None:
        raise ComposeError(f"{NAME}: {loss.text} has adapters, which change the forward of its layers; use bf16")
    layers = float8_layers(loss.module)
    if not layers:
        raise OptionError(
            f"{NAME}: {type(loss.module).__name__} has no nn.Linear that can multiply in float8: its sizes must be "
            f"multiples of {MULTIPLE}, and the last one, the head, is left out; use bf16"
        )
    forwards = [(layer, _forward(layer)) for layer in layers.values()]
    return dataclasses.replace(loss, scope=extend_scope(loss, lambda training: forwarding(forwards)))


def float8_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers of a module that multiply in float8, by name: each `nn.Linear` whose sizes are multiples of 16.

    The head is left out, because its rounding changes the loss most. It is the last linear layer, and any whose weight
    is tied to an embedding. Source: https://github.com/pytorch/ao/tree/main/torchao/float8.
    """
    linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    embedding_weights = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}

    def fits(layer: nn.Linear) -> bool:
        # A subclass with its own forward may compute something else.
        is_plain = type(layer).forward is nn.Linear.forward
        is_tied = id(layer.weight) in embedding_weights
        return is_plain and not is_tied and all(size % MULTIPLE == 0 for size in layer.weight.shape)

    return {name: layer for name, layer in list(linears.items())[:-1] if fits(layer)}


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a forward of a layer that multiplies in float8 by its current weight, as torchao does."""
    plain = _converted(layer, padded=False)
    padded = _converted(layer, padded=True)

    def forward(x: Tensor) -> Tensor:
        device_type = x.device.type
        if not x.numel():
            return nn.functional.linear(x, layer.weight, layer.bias)
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        # The gradient of the weight is a matmul that sums over the rows, so their number must be a multiple too.
        rows = x.numel() // x.shape[-1]
        converted = padded if rows % MULTIPLE else plain
        with bound([Slot(_torch.parameters_of(converted), "weight", "", False)], [layer.weight]):
            product: Tensor = converted.forward(x)
        return product if layer.bias is None else product + layer.bias.to(product.dtype)

    return forward


def _converted(layer: nn.Linear, *, padded: bool) -> Any:
    """Return torchao's layer of the same sizes, without memory; `padded` pads the rows to a multiple of 16."""
    empty = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    return _torchao().convert_to_float8_training(empty, config=_config(padded=padded))


def _config(*, padded: bool) -> Any:
    return _torchao().Float8LinearConfig(pad_inner_dim=padded)


def _torchao() -> Any:
    return importlib.import_module("torchao.float8")
