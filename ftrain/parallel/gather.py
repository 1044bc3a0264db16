"""Whole parameters of which each rank has a part, so that the gradient of each part is the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part, gather_all, scatter_all
from ftrain.step.unused_params import watching


def gathered(
    group: Group,
    locals_: Sequence[Tensor],
    parts: Sequence[Part | None],
    names: Sequence[str],
    on_backward: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Return the whole tensors; the gradients of the local parts are sums over the ranks of the group.

    Args:
        group: the ranks that have a part each.
        locals_: the parts of this rank; those that require no gradient are gathered without one.
        parts: how each tensor is divided; None for one that every rank has.
        names: of the tensors.
        on_backward: called when the gradients of all whole tensors are complete.
    """
    wholes: dict[int, Tensor] = {}
    for trained in (True, False):
        indices = [index for index, local in enumerate(locals_) if local.requires_grad == trained]
        tensors, their_parts = [locals_[index] for index in indices], [parts[index] for index in indices]
        join: Any = partial(_Gather.apply, group, their_parts, [names[index] for index in indices], on_backward)
        joined = join(*tensors) if trained and tensors else gather_all(group, tensors, their_parts)
        wholes.update(zip(indices, joined, strict=True))
    return [wholes[index] for index in range(len(locals_))]


class _Gather(torch.autograd.Function):
    """Joins the parts of all ranks; its transpose sums what each rank has for every part."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        parts: Sequence[Part | None],
        names: Sequence[str],
        on_backward: Callable[[], None],
        *locals_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.parts, ctx.names, ctx.on_backward = group, parts, names, on_backward
        ctx.set_materialize_grads(False)
        # A tensor that is whole already must not be returned itself.
        wholes = gather_all(group, locals_, parts)
        ctx.shapes = [(whole.shape, whole.dtype, whole.device) for whole in wholes]
        pairs = zip(wholes, locals_, strict=True)
        return tuple(whole.view_as(whole) if whole is local else whole for whole, local in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.on_backward()
        on_rank = watching()
        if on_rank is not None:
            on_rank.note_gathered(ctx.names, [grad is not None for grad in grads])
        wholes = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads, ctx.shapes, strict=True)
        ]
        return None, None, None, None, *scatter_all(ctx.group, wholes, ctx.parts)
