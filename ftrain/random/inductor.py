"""`Keyed` for graphs that Inductor compiles: one operation per draw, which it fuses with what uses the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain import random
from ftrain._torch.compile import inductor_random
from ftrain.random.philox import full
from ftrain.random.torch_ops import Keyed, float_dtype_of, shape_of


class _Source(NamedTuple):
    """A seed, a 0-d int64 tensor, and the examples of a batch that it is for: the first one, and their number."""

    seed: Tensor
    examples: tuple[int | Tensor, int] | None

    def draw(self, shape: Any, kind: str) -> Tensor:
        shape = list(shape)
        return inductor_random(shape, self.seed, kind, self._start(shape))

    def _start(self, shape: list[int]) -> Tensor | None:
        """The start of a draw in the draw for the whole batch, as in `random.for_examples`; None for a whole draw."""
        size = math.prod(shape)
        if self.examples is None or not shape or size % self.examples[1]:
            return None
        first, length = self.examples
        first = first if isinstance(first, Tensor) else full(self.seed, first)
        return first * (size // length)


_Draw: TypeAlias = Callable[[_Source, dict[str, Any]], Any]

_aten = torch.ops.aten


class Fused(Keyed):  # type: ignore[no-untyped-call]
    """Draw from Inductor's own counter-based generator, with a seed made from the key and the draw's number.

    The usual draws (dropout's and those of rand and randn) cost one operation each, and Philox written out in
    integer arithmetic a hundred, which take long to compile. Others are drawn as `Keyed` does. Only for
    graph capture: run eagerly, the operation would draw from torch's global generator.
    """

    def _drawn(self, func: Any, arguments: dict[str, Any], device: torch.device) -> Any:
        if func not in _DRAWS:
            return super()._drawn(func, arguments, device)
        key = random.to_device(self.key, device)
        source = _Source((key[1] << 32) + key[0] + self.offset, self.examples)
        self.offset += 1
        return _DRAWS[func](source, arguments)


def _uniform(source: _Source, a: dict[str, Any]) -> Tensor:
    return source.draw(shape_of(a), "rand").to(float_dtype_of(a))


def _normal(source: _Source, a: dict[str, Any]) -> Tensor:
    return source.draw(shape_of(a), "randn").to(float_dtype_of(a))


def _bernoulli(source: _Source, a: dict[str, Any]) -> Tensor:
    like: Tensor = a["self"]
    p: Tensor | float = a.get("p", like)
    return (source.draw(like.shape, "rand") < p).to(like.dtype)


def _native_dropout(source: _Source, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    keep = source.draw(a["input"].shape, "rand") < 1.0 - a["p"]
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
