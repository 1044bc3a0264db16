"""`Keyed` for graphs that Inductor compiles: one operation per draw, which it fuses with what uses the numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain import random
from ftrain._torch.compile import inductor_random
from ftrain.random.philox import full
from ftrain.random.torch_ops import Keyed, float_dtype_of, shape_of

_Source: TypeAlias = Callable[[Any, str], Tensor]
"""``(shape, "rand" or "randn") -> numbers``, a draw from one seed."""

_Draw: TypeAlias = Callable[[_Source, dict[str, Any]], Any]

_aten = torch.ops.aten


class Fused(Keyed):  # type: ignore[no-untyped-call]
    """Draw from Inductor's own counter-based generator, with a seed from the key and the number of the draw.

    The usual draws (dropout, rand, randn) are one operation each; Philox in integer arithmetic is a hundred, which take
    long to compile. Other operations draw as in `Keyed`. Only for graph capture: run eagerly, the operation draws from
    torch's global generator.
    """

    def _drawn(self, func: Any, arguments: dict[str, Any], device: torch.device) -> Any:
        if func not in _DRAWS:
            return super()._drawn(func, arguments, device)
        key = random.to_device(self.key, device)
        source = functools.partial(_draw_fused, (key[1] << 32) + key[0] + self.offset, self.examples)
        self.offset += 1
        return _DRAWS[func](source, arguments)


def _draw_fused(seed: Tensor, examples: tuple[int | Tensor, int] | None, shape: Any, kind: str) -> Tensor:
    """Draw for the whole batch, or for some of its examples as in `random.for_examples`."""
    shape, start = list(shape), None
    size = math.prod(shape)
    if examples is not None and shape and size % examples[1] == 0:
        first, length = examples
        start = (first if isinstance(first, Tensor) else full(seed, first)) * (size // length)
    return inductor_random(shape, seed, kind, start)


def _uniform(source: _Source, a: dict[str, Any]) -> Tensor:
    return source(shape_of(a), "rand").to(float_dtype_of(a))


def _normal(source: _Source, a: dict[str, Any]) -> Tensor:
    return source(shape_of(a), "randn").to(float_dtype_of(a))


def _bernoulli(source: _Source, a: dict[str, Any]) -> Tensor:
    like: Tensor = a["self"]
    p: Tensor | float = a.get("p", like)
    return (source(like.shape, "rand") < p).to(like.dtype)


def _native_dropout(source: _Source, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    keep = source(a["input"].shape, "rand") < 1.0 - a["p"]
    return torch.where(keep, a["input"] * random.keep_scale(a["p"]), 0.0), keep


_DRAWS: dict[Any, _Draw] = {
    _aten.rand.default: _uniform,
    _aten.rand_like.default: _uniform,
    _aten.randn.default: _normal,
    _aten.randn_like.default: _normal,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli_.float: _bernoulli,
    _aten.native_dropout.default: _native_dropout,
}
