"""The parameters that the loss of a rank reads; their gradients are sent while the backward pass runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from ftrain import tree
from ftrain._context import setting
from ftrain.parallel.block_gather import BlockGather
from ftrain.parallel.gather import Parameters
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part
from ftrain.step.rank_backward import announce
from ftrain.types import PyTree


class Passing(NamedTuple):
    """How the loss of a rank gets its parameters.

    `in_backward` is whether their gradients are sent in the backward pass. `wholes` are the trained parameters,
    gathered for all microbatches; None if the loss gathers them, or none is divided. `copies` are as for
    `GradientSums`.
    """

    in_backward: bool = True
    wholes: list[Tensor] | None = None
    copies: Group | None = None


_passing: ContextVar[Passing] = ContextVar("ftrain_passing")


@contextmanager
def passing(how: Passing) -> Iterator[None]:
    """Context of the forward passes of a step."""
    with setting(_passing, how):
        try:
            yield
        finally:
            # A loss that has failed has announced gradients that its backward pass will not take.
            announce(None)


def loss_params(
    level: int, ranks: Group, params: PyTree, parts: list[Part | None], blocks: BlockGather | None, order: Iterable[str]
) -> PyTree:
    """Return whole parameters for the loss of a rank. From level 1 on, `params` are the rank's `parts` of them.

    `params` are trained and frozen ones. `ranks` are those over which gradients are summed: all at level 0, from level
    1 on those that have a part each. `order` are the names in the order of their use, as far as they are known.
    """
    how = _passing.get()
    if not how.in_backward:
        return params
    leaves, spec = tree.flatten(params)
    # The keys of a flat dict are the names of its leaves.
    is_flat_dict = isinstance(params, dict) and len(params) == len(leaves)
    names = spec.entries() if is_flat_dict else tree.leaf_names(params)
    by_name = dict(zip(names, leaves, strict=True))
    in_order = dict.fromkeys([*(name for name in order if name in by_name), *names])
    gathered = Parameters(ranks, by_name, dict(zip(names, parts, strict=True)), how.copies)
    announce(gathered.sums)
    if level < 3:
        trained = [name for name in names if by_name[name].requires_grad]
        wholes = by_name if how.wholes is None else {**by_name, **dict(zip(trained, how.wholes, strict=True))}
        new = gathered.sums.in_buckets({name: wholes[name] for name in in_order})
    else:
        in_blocks = blocks.begin(gathered) if blocks is not None else {}
        outside = [name for name in in_order if name not in in_blocks]
        new = gathered.sums.in_buckets(gathered.take(outside)) | in_blocks
    return tree.unflatten(spec, [new[name] for name in names])
