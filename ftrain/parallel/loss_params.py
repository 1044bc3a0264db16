"""The parameters that the loss of a rank reads, whose gradients are sent while the backward pass runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from ftrain import tree
from ftrain.parallel.block_gather import BlockGather
from ftrain.parallel.gather import Parameters
from ftrain.parallel.gradient_sums import GradientSums, Start
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part, Results, start_scatter_all, start_sum_all
from ftrain.parallel.state import Layout
from ftrain.step.rank_backward import announce
from ftrain.types import PyTree


class _Passing(NamedTuple):
    """How the loss of a rank gets its parameters.

    Args:
        in_backward: whether their gradients are sent in the backward pass.
        wholes: parameters gathered for all microbatches; None if the loss gathers them, or none is divided.
        over_copies: function that sums gradients over the copies of the state in the backward pass too, if any.
    """

    in_backward: bool
    wholes: list[Tensor] | None
    over_copies: Start | None = None


_passing: ContextVar[_Passing] = ContextVar("ftrain_passing")


@contextmanager
def passing(in_backward: bool, wholes: list[Tensor] | None, over_copies: Start | None = None) -> Iterator[None]:
    """Context of the forward passes of a step.

    Args:
        in_backward: whether gradients are sent in the backward pass.
        wholes: the trained parameters, if they are gathered once for all microbatches.
        over_copies: function that sums gradients over the copies of the state in the backward pass too, if any.
    """
    token = _passing.set(_Passing(in_backward, wholes, over_copies))
    try:
        yield
    finally:
        _passing.reset(token)
        # A loss that has failed has announced gradients that its backward pass will not take.
        announce(None)


class LossParams:
    """Makes the parameters of a loss from those of a rank.

    Args:
        level: level of `sharded`.
        all_ranks: ranks over which the gradients of level 0 are summed.
        shard: the ranks that have a part each from level 1 on.
    """

    def __init__(self, level: int, all_ranks: Group, shard: Group) -> None:
        self._level, self._all, self._shard = level, all_ranks, shard

    def __call__(self, params: PyTree, layout: Layout, blocks: BlockGather | None, order: Mapping[str, None]) -> PyTree:
        """Return whole parameters.

        Args:
            params: trained and frozen ones, of which this rank has parts from level 1 on.
            layout: how they are divided.
            blocks: object that gathers the parameters of blocks, if any.
            order: names in the order of their use, as far as they are known.
        """
        if not _passing.get().in_backward:
            return params
        leaves, spec = tree.flatten(params)
        is_named = isinstance(params, dict) and len(params) == len(leaves)
        names = sorted(params) if is_named else tree.leaf_names(params)
        by_name = dict(zip(names, leaves, strict=True))
        used = [*(name for name in order if name in by_name), *(name for name in names if name not in order)]
        if self._level < 3:
            new = self._in_buckets(names, by_name, used, layout.params_parts)
        else:
            parts = dict(zip(names, layout.parts, strict=True))
            of_ranks = Parameters(self._shard, by_name, parts, _passing.get().over_copies)
            announce(of_ranks.sums)
            new = dict(blocks.leave_out(of_ranks)) if blocks is not None else {}
            others = [name for name in used if name not in new]
            new.update(zip(others, of_ranks.joined_in_buckets(others, of_ranks.start_gather(others)()), strict=True))
        return tree.unflatten(spec, [new[name] for name in names])

    def _in_buckets(
        self, names: Sequence[Any], params: Mapping[Any, Tensor], used: Sequence[Any], parts: Sequence[Part | None]
    ) -> dict[Any, Tensor]:
        """Return the whole parameters of levels 0 to 2."""
        trained = [name for name in names if params[name].requires_grad]
        numbers = {name: number for number, name in enumerate(trained)}
        wholes, locals_ = _passing.get().wholes, [params[name] for name in trained]
        sums = GradientSums([str(name) for name in trained], locals_, _passing.get().over_copies)
        announce(sums)

        def combine(indices: Sequence[int], grads: list[Tensor]) -> Results:
            if wholes is None:
                return start_sum_all(self._all, grads)
            return start_scatter_all(self._shard, grads, [parts[index] for index in indices])

        tensors = locals_ if wholes is None else wholes
        by_number = {numbers[name]: tensors[numbers[name]] for name in used if name in numbers}
        new = sums.in_buckets(by_number, combine, all_reduces=wholes is None)
        return {**params, **{name: new[number] for name, number in numbers.items()}}
