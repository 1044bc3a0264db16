"""The gradient of a step on many ranks: each computes on its rows, and gets its part of the sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from ftrain import tree
from ftrain.errors import LossError
from ftrain.parallel.batch_rows import Rows, computing_on
from ftrain.parallel.bucket_order import BucketOrder, stream_plan
from ftrain.parallel.compression.reduction import Reduction
from ftrain.parallel.loss_params import Passing, passing
from ftrain.parallel.loss_results import LossResults
from ftrain.parallel.mesh import ALL, REPLICATE, SHARD, Group
from ftrain.parallel.partition import Part, start_gather_all, start_scatter_all, start_sum_all
from ftrain.parallel.same_loss import SameProgram
from ftrain.parallel.state import Layout, current_layout
from ftrain.parallel.stock_draws import StockDraws
from ftrain.step.forward import versions
from ftrain.step.value_and_grad import StreamingGrad
from ftrain.tree import sharding
from ftrain.types import GradFn, Gradients, PyTree, TrainState, replace


class RankGradient:
    """Makes a gradient function of all ranks from one that computes on the rows of this rank.

    `order` are the names of the parameters in the order of their use, as far as it is known.
    """

    def __init__(self, level: int, groups: Mapping[str, Group], reduction: Reduction) -> None:
        self._level, self._reduction = level, reduction
        self._all, self._shard, self._replicate = groups[ALL], groups[SHARD], groups[REPLICATE]
        self._planned: tuple[Layout, list[list[int]]] | None = None
        self.order: Mapping[str, None] = {}

    def of(self, grad: GradFn) -> GradFn:
        """Return the gradient function of all ranks: its gradients are whole at level 0, else this rank's parts."""
        draws, results, program = StockDraws(self._all), LossResults(self._all), SameProgram(self._all)
        local_grad = results.started_by(grad)

        def combined(state: TrainState, rows: Rows, rng: Tensor | None) -> Gradients:
            parts = current_layout.get().params_parts
            in_backward = self._combines_in_backward(grad, rows)
            wholes = None
            if 0 < self._level < 3:
                leaves, spec = tree.flatten(state.params)
                wholes = start_gather_all(self._shard, leaves, parts)()
                state = state if in_backward else replace(state, params=tree.unflatten(spec, wholes))
            how = Passing(in_backward, wholes, self._copies(grad, rows) if in_backward else None)
            compute = partial(local_grad, state, rows.batch, rng)
            with program.required(state), passing(how), computing_on(rows), sharding.over(None):
                local, drawing = draws.run(compute, state)
            stream_grads = local.stream_grads
            if self._all.size == 1 and stream_grads is None:
                return local
            whole = results.of_all_ranks(replace(local, grads=None), state.buffers, rows)
            if stream_grads is not None:

                def backward(take: Callable[[int, Tensor], None]) -> None:
                    writes = versions(tree.leaves(local.buffers))
                    # A block that is computed again uses these rows, too.
                    with drawing, computing_on(rows), program.required(state), passing(how):
                        stream_grads(take)
                    if self._all.size > 1:
                        _require_no_writes(local.buffers, writes)

                plan = self._stream_plan(state.params)
                return replace(whole, stream_grads=partial(self._stream, backward, in_backward, plan))
            leaves, spec = tree.flatten(local.grads)
            if self._reduction.is_active:
                grads, slots = self._reduction(leaves, parts, state.slots, spec)
                return replace(whole, grads=tree.unflatten(spec, grads), accepted_slots=slots)
            if how.copies is None:
                leaves = self._combined(leaves, parts, in_backward)
            return replace(whole, grads=tree.unflatten(spec, leaves))

        return combined

    def _combines_in_backward(self, grad: GradFn, rows: Rows) -> bool:
        """Return whether gradients are sent in each backward pass, and not after that of the last microbatch."""
        if self._level == 3:
            return self._shard.size > 1
        if self._reduction.is_active or isinstance(grad, StreamingGrad):
            return False
        ranks = self._shard if self._level else self._all
        return ranks.size > 1 and (self._level == 2 or rows.microbatches == 1)

    def _copies(self, grad: GradFn, rows: Rows) -> Group | None:
        """Return the ranks with the same parts, if their gradients are summed while the backward pass runs.

        None if there are none, or if their gradients are summed later: once for all microbatches, compressed, or as
        they are streamed.
        """
        if self._level == 0 or self._replicate.size == 1:
            return None
        if rows.microbatches > 1 or self._reduction.is_active or isinstance(grad, StreamingGrad):
            return None
        return self._replicate

    def _stream(
        self,
        backward: Callable[..., None],
        in_backward: bool,
        plan: list[list[int]],
        take: Callable[[int, Tensor], None],
    ) -> None:
        """Run a backward pass, and give `take` the gradients of all ranks, which are sent in the buckets of `plan`."""
        parts = current_layout.get().params_parts

        def start(indices: Sequence[int], grads: list[Tensor]) -> None:
            combined = self._combined(grads, [parts[index] for index in indices], in_backward)
            for index, grad in zip(indices, combined, strict=True):
                take(index, grad)

        order = BucketOrder(plan, start)

        def take_local(index: int, grad: Tensor) -> None:
            order.take(index, grad)
            order.start_complete()

        backward(take_local)

    def _stream_plan(self, params: PyTree) -> list[list[int]]:
        layout = current_layout.get()
        if self._planned is None or layout is not self._planned[0]:
            self._planned = layout, stream_plan(params, layout.params_parts, self.order)
        return self._planned[1]

    def _combined(self, grads: list[Tensor], parts: list[Part | None], in_backward: bool) -> list[Tensor]:
        """Return the gradients of all ranks: whole at level 0, else this rank's parts of them.

        `grads` are this rank's whole gradients; if `in_backward`, the backward pass has summed them over a group
        already.
        """
        if self._level == 0:
            return grads if in_backward else start_sum_all(self._all, grads)()
        if self._level < 3 and not in_backward:
            grads = start_scatter_all(self._shard, grads, parts)()
        return start_sum_all(self._replicate, grads)()


def _require_no_writes(buffers: PyTree, writes: list[int | None]) -> None:
    """Raises a LossError if a streamed backward pass has written a buffer: ranks have averaged the buffers before."""
    counts = zip(tree.leaf_names(buffers), writes, versions(tree.leaves(buffers)), strict=True)
    if changed := [name for name, old, new in counts if old != new]:
        raise LossError(
            f"sharded: with update_in_backward the backward pass changes the buffer {changed[0]}, as a model that "
            "calls torch.utils.checkpoint does, which ranks would lose; use ft.remat() in its place, or leave out "
            "update_in_backward"
        )
