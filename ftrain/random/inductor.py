"""`Keyed` for graphs that Inductor compiles: one operation per draw, fused with the operations that use the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftrain import random
from ftrain._torch.compile import inductor_random
from ftrain.random.philox import full
from ftrain.random.torch_ops import Keyed, float_dtype_of

_aten = torch.ops.aten
_NORMAL = {_aten.randn.default, _aten.randn_like.default}
_BERNOULLI = {_aten.bernoulli.default, _aten.bernoulli.p, _aten.bernoulli_.float}
_CHOICES = {_aten.native_dropout.default, *_BERNOULLI}
_UNIFORM = {_aten.rand.default, _aten.rand_like.default}


class Fused(Keyed):  # type: ignore[no-untyped-call]
    """Draw from Inductor's own counter-based generator, with a seed from the key and the number of the draw.

    The usual draws (dropout, rand, randn) are one operation each. In `Keyed` they are about a hundred integer
    operations (Philox), which take long to compile. Other random operations draw as in `Keyed`. Only for graph capture:
    in eager mode, the operation of Inductor draws from torch's global generator.
    """

    def _drawn(self, func: Any, arguments: dict[str, Any], device: torch.device) -> Any:
        draws_numbers = func in _NORMAL or func in _UNIFORM
        # Other dtypes, such as complex ones, are refused there.
        if func not in _CHOICES and not (draws_numbers and float_dtype_of(arguments).is_floating_point):
            return super()._drawn(func, arguments, device)
        like: Any = arguments.get("input", arguments.get("self"))
        numbers = self._numbers(arguments["size"] if like is None else like.shape, func in _NORMAL, device)
        if func is _aten.native_dropout.default:
            keep = numbers < 1.0 - arguments["p"]
            return torch.where(keep, like * random.keep_scale(arguments["p"]), 0.0), keep
        if func in _BERNOULLI:
            return (numbers < arguments.get("p", like)).to(like.dtype)
        dtype = float_dtype_of(arguments)
        if func in _UNIFORM and dtype.itemsize < 4:
            # To the multiples that `random.uniform` draws: rounded to the nearest, one of 512 would be 1 in bfloat16.
            numbers = (numbers * (2 / torch.finfo(dtype).eps)).floor() * (torch.finfo(dtype).eps / 2)
        return numbers.to(dtype)

    def _numbers(self, shape: Sequence[Any], normal: bool, device: torch.device) -> Tensor:
        """Draw float32 numbers for the whole batch, or for some of its examples as in `random.for_examples`."""
        key = random.to_device(self.key, device)
        seed = (key[1] << 32) + key[0] + self.offset
        start = None
        size = math.prod(shape)
        self.offset += 1
        if self.examples is not None and shape and size % self.examples[1] == 0:
            first, length = self.examples
            start = (first if isinstance(first, Tensor) else full(seed, first)) * (size // length)
        return inductor_random(list(shape), seed, "randn" if normal else "rand", start)
