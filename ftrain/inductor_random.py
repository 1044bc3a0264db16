"""`Keyed` for graphs that Inductor compiles: one operation a draw, which it fuses with what uses the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain import random
from ftrain.keyed import Keyed

_Draw: TypeAlias = Callable[[Tensor, dict[str, Any]], Any]

_aten = torch.ops.aten


class Fused(Keyed):  # type: ignore[no-untyped-call]
    """Draw from Inductor's own counter-based generator, with a seed made from the key and the draw's number.

    The usual draws (dropout's and those of rand and randn) cost one operation each where Philox written out in
    integer arithmetic costs a hundred, which take long to compile. Others are drawn as `Keyed` does. To be
    captured only: run eagerly, the operation would draw from torch's global generator.
    """

    def _draw(self, func: Any, arguments: dict[str, Any]) -> Any:
        draw = _DRAWS.get(func)
        if draw is None or arguments.get("generator") is not None:
            return super()._draw(func, arguments)
        target: Any = arguments.get("self", arguments.get("input"))
        device = arguments.get("device") or (torch.get_default_device() if target is None else target.device)
        words = random.to_device(self.key, device)
        drawn = draw((words[1] << 32) + words[0] + self.offset, arguments)
        self.offset += 1
        return target.copy_(drawn) if func._schema.is_mutable else drawn


def _draw(shape: Any, seed: Tensor, kind: str) -> Tensor:
    # Imported where it is used: Inductor takes seconds.
    from torch._inductor import inductor_prims

    return inductor_prims.random(list(shape), seed, kind)  # type: ignore[no-any-return]


def _shape(a: dict[str, Any]) -> Any:
    return a["size"] if "size" in a else a["self"].shape


def _dtype(a: dict[str, Any]) -> torch.dtype:
    dtype = a.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype
    return a["self"].dtype if "self" in a else torch.get_default_dtype()


def _uniform(seed: Tensor, a: dict[str, Any]) -> Tensor:
    return _draw(_shape(a), seed, "rand").to(_dtype(a))


def _normal(seed: Tensor, a: dict[str, Any]) -> Tensor:
    return _draw(_shape(a), seed, "randn").to(_dtype(a))


def _bernoulli(seed: Tensor, a: dict[str, Any]) -> Tensor:
    like: Tensor = a["self"]
    p: Tensor | float = a.get("p", like)
    return (_draw(like.shape, seed, "rand") < p).to(like.dtype)


def _native_dropout(seed: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    keep = _draw(a["input"].shape, seed, "rand") < 1.0 - a["p"]
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
