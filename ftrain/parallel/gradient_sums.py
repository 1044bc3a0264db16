"""Sum gradients over ranks. The sums start in the backward pass, as gradients become complete, and end with it.

In place of its parameters, a loss reads the results of autograd nodes. Each node gets the gradients of a bucket, or of
a block, when all of them are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ftrain import _torch
from ftrain.errors import LossError
from ftrain.parallel.bucket_order import BucketOrder, plan_of
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part, Results, start_scatter_all, start_sum_all
from ftrain.step.rank_backward import Backward, unused_on_rank
from ftrain.step.value_and_grad import refuse_sparse

MOST_SUMS, MOST_SUM_BYTES = 2, 4 << 30
"""The most sums, and bytes of them, that run at a time: more would take memory from the computation."""

BUCKETS, SMALLEST_BUCKET, LARGEST_BUCKET = 4, 8 << 20, 32 << 20
"""Number of buckets, and the limits of their bytes: smaller ones take CPUs more time than their overlap saves."""


class GradientSums:
    """The gradients of the parameters of one forward pass; a `ftrain.step.rank_backward.CombinedGrads`.

    `params` are this rank's parameters by name; a sum has the shape of its parameter. `parts` say how each parameter is
    divided over the group; None for one that every rank has. `copies` are the ranks that have the same parts, over
    which the sums are summed again; None if that is done later.
    """

    def __init__(
        self,
        group: Group,
        params: Mapping[Hashable, Tensor],
        parts: Mapping[Hashable, Part | None],
        copies: Group | None = None,
    ) -> None:
        self._group, self._params, self._parts, self._copies = group, params, parts, copies
        self._started: deque[tuple[Sequence[Hashable], Results, int]] = deque()
        self._started_over_copies: list[tuple[Sequence[Hashable], Results]] = []
        self._sums: dict[Hashable, Tensor] = {}
        self._used: set[Hashable] = set()
        self._buckets: BucketOrder | None = None
        self._has_blocks = False
        self._source: Tensor | None = None
        self._is_in_backward = False

    def in_buckets(self, wholes: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """Return the tensors that a loss reads; their gradients are sent in buckets, in one order on all ranks.

        `wholes` are whole tensors by the names of their parameters, in the order of their use; those without a
        gradient are returned as they are.
        """
        trained = {name: whole for name, whole in wholes.items() if name in self._params}
        tensors = [*trained.values()]
        limit = min(max(sum(tensor.nbytes for tensor in tensors) // BUCKETS, SMALLEST_BUCKET), LARGEST_BUCKET)
        plan = plan_of([*trained], tensors, [tensor.numel() for tensor in tensors], limit)
        self._buckets = BucketOrder(plan, self._start)
        new = dict(wholes)
        for names in plan:
            read = self._read(names, [wholes[name] for name in names], partial(self._take, names))
            # Autograd runs the newest nodes first. This one is older than the loss, and would run after all others.
            _torch.run_when_ready(read[0])
            new.update(zip(names, read, strict=True))
        return new

    def of_block(self, wholes: Mapping[Hashable, Tensor], on_backward: Callable[[], None]) -> dict[Hashable, Tensor]:
        """As `in_buckets`, for a block: `on_backward` is called when all its gradients are complete; they are sent."""
        names = [name for name in wholes if name in self._params]
        if not names:
            return dict(wholes)

        def complete(grads: Sequence[Tensor | None]) -> None:
            on_backward()
            pairs = list(zip(names, grads, strict=True))
            self._used.update(name for name, grad in pairs if grad is not None)
            # Gradients of parameters that were gathered in another dtype are summed in the dtype of the parameters.
            dense = [self._zeros(name) if grad is None else grad.to(self._params[name].dtype) for name, grad in pairs]
            self._start(names, dense)

        self._has_blocks = True
        tensors = self._read(names, [wholes[name] for name in names], complete)
        return {**wholes, **dict(zip(names, tensors, strict=True))}

    def backward(self, run: Backward) -> list[Tensor | None]:
        """Run the backward pass; return the sums, 0 where there was no gradient."""
        self._is_in_backward = True
        run([] if self._source is None else [self._source])
        if self._buckets is not None:
            self._buckets.start_rest(self._zeros)
            # The buckets refer to this object: the sums would stay in memory until Python collects the cycle.
            self._buckets = None
        while self._started:
            self._finish()
        for names, results in self._started_over_copies:
            self._add(names, results())
        on_rank = unused_on_rank()
        if on_rank is not None:
            on_rank.note_gathered([str(name) for name in self._params], [name in self._used for name in self._params])
        sums = self._sums
        return [sums[name] if name in sums else torch.zeros_like(param) for name, param in self._params.items()]

    def _read(
        self,
        names: Sequence[Hashable],
        wholes: Sequence[Tensor],
        complete: Callable[[Sequence[Tensor | None]], None],
    ) -> list[Tensor]:
        """Return tensors with the same values, for the loss; `complete` gets their gradients when all are complete."""
        if self._source is None:
            self._source = torch.zeros((), device=wholes[0].device, requires_grad=True)

        def complete_in_backward(grads: Sequence[Tensor | None]) -> None:
            if not self._is_in_backward:
                raise LossError(
                    "sharded: the loss runs a backward pass through its parameters, whose gradients would be sent to "
                    "the other ranks; take the gradients it needs with torch.autograd.grad(output, inputs)"
                )
            for name, grad in zip(names, grads, strict=True):
                if grad is not None and grad.is_sparse:
                    refuse_sparse("sharded", str(name))
            complete(grads)

        return list(_Read.apply(complete_in_backward, wholes, self._source))  # type: ignore[no-untyped-call]

    def _take(self, names: Sequence[Hashable], grads: Sequence[Tensor | None]) -> None:
        buckets = cast(BucketOrder, self._buckets)
        for name, grad in zip(names, grads, strict=True):
            if grad is None:
                continue
            if name in self._used:
                raise LossError(
                    f"sharded: the gradient of {name} comes in several parts, because the loss calls "
                    "torch.autograd.backward within its backward pass (reversible layers, a checkpoint of its own); "
                    "the first part may be sent already: use each parameter once, in such a layer or outside"
                )
            self._used.add(name)
            buckets.take(name, grad)
        # With blocks, a rank without one of these gradients would start the bucket later, between other blocks.
        if not self._has_blocks:
            buckets.start_complete()

    def _start(self, names: Sequence[Hashable], grads: list[Tensor]) -> None:
        """Start to sum gradients; waits for the oldest if many are being sent."""
        results = start_scatter_all(self._group, grads, [self._parts[name] for name in names])
        self._started.append((names, results, sum(grad.nbytes for grad in grads)))
        while len(self._started) > MOST_SUMS or sum(nbytes for _, _, nbytes in self._started) > MOST_SUM_BYTES:
            self._finish()

    def _finish(self) -> None:
        names, results, _ = self._started.popleft()
        if self._copies is None:
            self._add(names, results())
        else:
            self._started_over_copies.append((names, start_sum_all(self._copies, results())))

    def _add(self, names: Sequence[Hashable], grads: list[Tensor]) -> None:
        for name, grad in zip(names, grads, strict=True):
            self._sums[name] = self._sums[name] + grad if name in self._sums else grad

    def _zeros(self, name: Hashable) -> Tensor:
        """Return the gradient of a parameter that this rank does not use."""
        param, part = self._params[name], self._parts[name]
        return param.new_zeros(param.shape if part is None else part.shape)


class _Read(torch.autograd.Function):
    """Returns whole tensors; the function `complete` gets their gradients when all are complete.

    `source` requires a gradient: without it the results would need none.
    """

    @staticmethod
    def forward(
        ctx: Any, complete: Callable[[Sequence[Tensor | None]], None], wholes: Sequence[Tensor], source: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.complete = complete
        return tuple(whole.detach() for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.complete(grads)
        return None, None, None
