"""Rematerialisation (activation checkpointing): compute activations twice rather than keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ftrain import keyed
from ftrain.blocks import Blocks, find_blocks
from ftrain.errors import ComposeError, OptionError
from ftrain.grad import detach
from ftrain.slots import Slot, bound
from ftrain.types import Loss, LossOutput, PyTree
from ftrain.wrapper import Wrapper, wrapper

POLICIES = ("full", "dots")

_aten = torch.ops.aten
DOTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Products, convolutions and attention: dear to compute, and small beside what lies between them."""


@wrapper
def remat(policy: str = "full", blocks: Sequence[type[nn.Module] | str] | None = None) -> Wrapper:
    """Keep only the inputs of each block for the backward pass, and compute its inside again there.

    Gradients are the same to the bit, dropout included, and buffers advance once (Chen et al. 2016,
    arXiv:1604.06174). Blocks are the given ones, else the repeated children of the module's
    `ModuleList` and `Sequential`; in a pure function, those marked by `ft.block`.

    Args:
        policy: ``"full"`` recomputes everything, ``"dots"`` keeps matrix products, convolutions and
            attention and recomputes the rest.
        blocks: types of modules or their dotted names.

    Raises:
        OptionError: for an unknown policy, or when there is no such block.
        ComposeError: when a pure loss ran without meeting a function marked by `ft.block`.
    """
    if policy not in POLICIES:
        raise OptionError(f"remat: policy is {policy!r}; choices are {', '.join(POLICIES)}")
    if blocks is not None and not isinstance(blocks, list | tuple):
        raise OptionError(f"remat: blocks is {blocks!r}, needs a list of types and dotted names")

    def wrap(loss: Loss) -> Loss:
        if loss.module is None and blocks:
            raise OptionError(
                f"remat: {loss.text} has no module in which to find blocks={blocks!r}; mark functions with ft.block"
            )
        parts = find_blocks(loss.module, blocks) if loss.module is not None else []
        prepared = Blocks(parts, loss.adapters)
        met = [0]
        region = _region(policy, met)

        @contextmanager
        def scope(training: bool) -> Iterator[None]:
            with loss.scope(training), prepared.through(region):
                yield

        def counted(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            if torch.compiler.is_dynamo_compiling():  # Counting would be a guard of its graph.
                return loss.fn(params, batch, rng=rng, buffers=buffers)
            before = met[0]
            returned = loss.fn(params, batch, rng=rng, buffers=buffers)
            if met[0] == before:
                raise ComposeError(
                    f"remat: {loss.text} ran no block; mark the functions to recompute with ft.block(function), "
                    "or name modules with blocks=[...]"
                )
            return returned

        text = f"remat({', '.join([policy] * (policy != 'full') + [f'blocks={len(parts)}'] * bool(parts))})"
        return dataclasses.replace(loss, fn=counted, scope=scope, text=f"{loss.text} <- {text}")

    return Wrapper("remat", "remat", "loss", loss=wrap)


def _region(policy: str, met: list[int]) -> Callable[..., Any]:
    def region(function: Callable[..., Any], slots: Sequence[Slot], *args: Any, **kwargs: Any) -> Any:
        met[0] += 1
        return checkpoint(_Repeatable(function, slots, policy), *args, use_reentrant=False, **kwargs)

    # Dynamo may compile the inside of a block, but not this: its own checkpoint would not run `_Repeatable` again.
    return torch.compiler.disable(region, recursive=False)  # type: ignore[no-untyped-call,no-any-return]


class _Repeatable:
    """A block whose later runs see what the first one saw: parameters, buffers and random numbers."""

    def __init__(self, function: Callable[..., Any], slots: Sequence[Slot], policy: str) -> None:
        self._function, self._slots = function, list(slots)
        # What a block does to its buffers must happen once: recomputation works on copies.
        self._values = [s.place[s.key].clone() if s.is_buffer else s.place[s.key] for s in slots]
        self._stream = keyed.current()
        self._offset = self._stream.offset if self._stream is not None else 0
        self._kept: list[Any] | None = [] if policy == "dots" else None
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, the first time as it is, and afterwards as it was."""
        if not self._ran:
            self._ran = True
            with nullcontext() if self._kept is None else _Keep(self._kept):
                return self._function(*args, **kwargs)
        again = nullcontext() if self._stream is None else self._stream.replay(self._offset)
        with (
            bound(self._slots, self._values),
            again,
            nullcontext() if self._kept is None else _Reuse(self._kept),
        ):
            return self._function(*args, **kwargs)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep what the operations in `DOTS` return."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        returned = func(*args, **(kwargs or {}))
        if func in DOTS:
            # Detached: autograd attaches the graph to what is returned, which must not be kept alive.
            self._kept.append(detach(returned))
        return returned


class _Reuse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Return what `_Keep` has kept, in the same order, instead of computing it."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = iter(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless its result is there."""
        return detach(next(self._kept)) if func in DOTS else func(*args, **(kwargs or {}))
