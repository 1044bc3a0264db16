"""`Keyed` for graphs that Inductor compiles: one operation a draw, which it fuses with what uses the numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain import random
from ftrain.random.torch_ops import Keyed


class _Source(NamedTuple):
    """A seed, a 0-d int64 tensor, and for which examples of a batch it serves: the first one, and how many."""

    seed: Tensor
    examples: tuple[int | Tensor, int] | None

    def draw(self, shape: Any, kind: str) -> Tensor:
        # Imported where it is used: Inductor takes seconds.
        from torch._inductor import inductor_prims

        shape, offset = list(shape), self._offset(shape)
        if isinstance(offset, Tensor):
            return _drawn_from_tensor()(shape, self.seed, kind, offset)
        if offset:
            return _drawn_from()(shape, self.seed, kind, offset)
        return inductor_prims.random(shape, self.seed, kind)  # type: ignore[no-any-return]

    def _offset(self, shape: Any) -> int | Tensor:
        """Where a draw begins in that for the whole batch, as in `random.for_examples`."""
        size: int = math.prod(shape)
        if self.examples is None or not shape or size % self.examples[1]:
            return 0
        return self.examples[0] * (size // self.examples[1])


_Draw: TypeAlias = Callable[[_Source, dict[str, Any]], Any]

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
        source = _Source((words[1] << 32) + words[0] + self.offset, self.examples)
        drawn = draw(source, arguments)
        self.offset += 1
        return target.copy_(drawn) if func._schema.is_mutable else drawn


@functools.cache
def _drawn_from() -> Callable[..., Tensor]:
    """Inductor's operation with an offset, which its lowering takes and the operation itself does not."""
    from torch._inductor import inductor_prims, lowering

    made: Callable[..., Tensor] = inductor_prims.make_prim(
        "ftrain_random(SymInt[] size, Tensor seed, str mode, int offset) -> Tensor",
        lambda size, seed, mode, offset: getattr(torch, mode)(size, device=seed.device, dtype=torch.float32),
        doc="what inductor_random draws, from element `offset` on",
    )

    @lowering.register_lowering(made, type_promotion_kind=None)
    def lowered(size: Any, seed: Any, mode: str, offset: int) -> Any:
        return lowering.inductor_random(size, seed, mode, offset=offset)

    return made


@functools.cache
def _drawn_from_tensor() -> Callable[..., Tensor]:
    """The same with the offset as a 0-d int64 tensor, so that one graph serves for every piece of a batch."""
    from torch._inductor import inductor_prims, ir, lowering
    from torch._inductor.virtualized import ops

    made: Callable[..., Tensor] = inductor_prims.make_prim(
        "ftrain_random_at(SymInt[] size, Tensor seed, str mode, Tensor offset) -> Tensor",
        lambda size, seed, mode, offset: getattr(torch, mode)(size, device=seed.device, dtype=torch.float32),
        doc="what inductor_random draws, from element `offset` on",
    )

    @lowering.register_lowering(made, type_promotion_kind=None)
    def lowered(size: Any, seed: Any, mode: str, offset: Any) -> Any:
        device, size = seed.get_device_or_error(), [*size]
        strides = ir.FlexibleLayout.contiguous_strides(size)
        place = ir.FixedLayout(device, torch.float32, size, strides).make_indexer()
        load_seed, load_offset = seed.make_loader(), offset.make_loader()

        def element(index: Any) -> Any:
            begins = ops.to_dtype(load_offset([]), torch.int32)
            return getattr(ops, mode)(load_seed([]), ops.add(ops.index_expr(place(index), torch.int32), begins))

        drawn = ir.Pointwise.create(device=device, dtype=torch.float32, inner_fn=element, ranges=size)
        drawn.realize()
        return drawn

    return made


def _shape(a: dict[str, Any]) -> Any:
    return a["size"] if "size" in a else a["self"].shape


def _dtype(a: dict[str, Any]) -> torch.dtype:
    dtype = a.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype
    return a["self"].dtype if "self" in a else torch.get_default_dtype()


def _uniform(source: _Source, a: dict[str, Any]) -> Tensor:
    return source.draw(_shape(a), "rand").to(_dtype(a))


def _normal(source: _Source, a: dict[str, Any]) -> Tensor:
    return source.draw(_shape(a), "randn").to(_dtype(a))


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
