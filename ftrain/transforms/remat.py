"""Rematerialisation (activation checkpointing): compute activations twice rather than keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ftrain import keyed
from ftrain.errors import ComposeError, OptionError
from ftrain.module import Blocks, Slot, bound, find_blocks
from ftrain.step import Wrapper, wrapper
from ftrain.types import Loss, LossOutput, PyTree

Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

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

    def wrap(loss: Loss) -> Loss:
        parts = find_blocks(loss.module, blocks) if loss.module is not None else []
        prepared = Blocks(parts)
        met = [0]

        @contextmanager
        def scope(training: bool) -> Iterator[None]:
            with loss.scope(training), prepared.through(_region(policy, met)):
                yield

        def counted(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
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
        contexts = _contexts(slots, policy)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return region


def _contexts(slots: Sequence[Slot], policy: str) -> Contexts:
    """Contexts of the first run and of the recomputation, which must see what the first one saw."""
    # What a block does to its buffers must happen once: the recomputation works on copies.
    values = [s.place[s.key].clone() if s.is_buffer else s.place[s.key] for s in slots]
    stream = keyed.current()
    offset = stream.offset if stream is not None else 0

    @contextmanager
    def again() -> Iterator[None]:
        with bound(list(slots), values), stream.replay(offset) if stream is not None else nullcontext():
            yield

    def make() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if policy == "full":
            return nullcontext(), again()
        first, second = create_selective_checkpoint_contexts(_keep_dots)
        return first, _both(second, again())

    return make


def _keep_dots(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DOTS else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
