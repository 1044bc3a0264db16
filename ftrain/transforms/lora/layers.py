"""The forward of a module with an adapter: its result, plus the product of two small matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ftrain.transforms.lora.config import Config
from ftrain.transforms.lora.targets import Target
from ftrain.transforms.lora.weights import norms


def forward(target: Target, config: Config) -> Callable[..., Tensor]:
    """Return the forward of a module with its adapter, whose tensors are bound in ``target.tensors`` while it runs."""
    return _embedding(target, config) if target.is_embedding else _linear(target, config)


def _linear(target: Target, config: Config) -> Callable[..., Tensor]:
    part: Any = target.part
    tensors, base, scale, rate = target.tensors, part.forward, config.scale, config.dropout

    def linear(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = base(x, *args, **kwargs)
        a, b = tensors["a"], tensors["b"]
        drops = bool(rate) and part.training
        inputs = x.to(a.dtype)
        inputs = F.dropout(inputs, rate) if drops else inputs
        # Scaled where it has the fewest elements.
        product = F.linear(F.linear(inputs, a) * scale, b)
        if not config.dora:
            return (result + product).to(result.dtype)
        ratio: Tensor = tensors["magnitude"] / norms(target.matrix(part.weight), a, b, scale)
        # The ratio scales the weight as well, on the same inputs after dropout, and not the bias.
        by_weight = base(inputs.to(x.dtype), *args, **kwargs) if drops else result
        by_weight = by_weight if part.bias is None else by_weight - part.bias
        return (result + (ratio - 1) * by_weight + ratio * product).to(result.dtype)

    return linear


def _embedding(target: Target, config: Config) -> Callable[..., Tensor]:
    part: Any = target.part
    tensors, base, scale = target.tensors, part.forward, config.scale

    def embedding(indices: Tensor) -> Tensor:
        result: Tensor = base(indices)
        a, b = tensors["a"], tensors["b"]
        rows = F.embedding(indices, a.T, part.padding_idx, scale_grad_by_freq=part.scale_grad_by_freq)
        product: Tensor = (rows * scale) @ b.T
        if not config.dora:
            return (result + product).to(result.dtype)
        ratio: Tensor = tensors["magnitude"] / norms(target.matrix(part.weight), a, b, scale)
        return (ratio * (result + product)).to(result.dtype)

    return embedding
