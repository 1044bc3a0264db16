"""Sums of gradients over ranks, which start in the backward pass when gradients are complete, and end with it.

A loss does not read its parameters but the results of autograd nodes, each of which takes the gradients of a
bucket, or of a block, when all of them are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ftrain import _torch
from ftrain.errors import LossError
from ftrain.parallel.bucket_order import BucketOrder, plan_of
from ftrain.parallel.partition import Results
from ftrain.step.rank_backward import Backward, unused_on_rank

AT_ONCE, AT_ONCE_BYTES = 2, 4 << 30
"""Number and bytes of buffers that are sent at a time: more would take memory from the computation."""

SMALLEST, BUCKETS, LARGEST = 4 << 20, 4, 32 << 20
"""Bytes of the smallest and the largest bucket, and how many buckets there are between these limits."""

SMALLEST_REDUCED = 8 << 20
"""Bytes of the smallest bucket that is all-reduced: smaller ones take CPUs more time than their overlap saves."""

Combine: TypeAlias = Callable[[Sequence[int], list[Tensor]], Results]
"""``(indices, gradients) -> results``: starts to combine the gradients of the parameters of these indices."""

Start: TypeAlias = Callable[[list[Tensor]], Results]
"""``gradients -> results``: starts to sum what was combined over the copies of the state."""


class GradientSums:
    """The gradients of the parameters of one forward pass; a `ftrain.step.rank_backward.CombinedGrads`.

    Args:
        names: names of the parameters.
        params: parameters of this rank; a sum has the shape of its parameter.
        over_copies: function that sums over the copies of the state what was combined within one; None if that is done
            later.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor], over_copies: Start | None = None) -> None:
        self._names, self._params, self._over_copies = names, params, over_copies
        self._started: deque[tuple[Sequence[int], Results]] = deque()
        self._started_over_copies: list[tuple[Sequence[int], Results]] = []
        self._nbytes: deque[int] = deque()  # Of what was started.
        self._sums: dict[int, Tensor] = {}
        self._used: set[int] = set()
        self._sparse: dict[int, Tensor] = {}
        self._buckets: BucketOrder | None = None
        self._forms: dict[int, _Form] = {}  # Of what is in buckets.
        self._has_blocks = False
        self._source: Tensor | None = None
        self._is_in_backward = False

    def in_buckets(
        self, wholes: Mapping[int, Tensor], combine: Combine, *, all_reduces: bool = False
    ) -> dict[int, Tensor]:
        """Return the tensors that a loss reads; their gradients are sent in buckets, in one order on all ranks.

        Args:
            wholes: whole tensors by the indices of their parameters, in the order of their use.
            combine: function of the gradients of one bucket.
            all_reduces: whether `combine` all-reduces them.
        """
        plan = _plan_of(wholes, SMALLEST_REDUCED if all_reduces else SMALLEST)
        self._forms = {index: _Form.of(whole) for index, whole in wholes.items()}
        self._buckets = BucketOrder(plan, partial(self._start, combine))
        new: dict[int, Tensor] = {}
        for indices in plan:
            tensors = self._read([wholes[index] for index in indices], partial(self._take, indices))
            # Autograd runs the newest nodes first, and this one is older than the loss.
            _torch.run_when_ready(tensors[0])
            new.update(zip(indices, tensors, strict=True))
        return new

    def at_once(self, wholes: Sequence[Tensor], indices: Sequence[int], combine: Combine) -> list[Tensor]:
        """Return whole tensors for a block; their gradients are sent when all of them are complete.

        Args:
            wholes: the gathered parameters.
            indices: indices of the parameters.
            combine: function of the gradients of `wholes`.
        """
        forms = [_Form.of(whole) for whole in wholes]

        def complete(grads: Sequence[Tensor | None]) -> None:
            self._used.update(index for index, grad in zip(indices, grads, strict=True) if grad is not None)
            pairs = zip(grads, forms, strict=True)
            self._start(combine, indices, [form.zeros() if grad is None else grad for grad, form in pairs])

        self._has_blocks = True
        return self._read(wholes, complete)

    def backward(self, run: Backward) -> list[Tensor | None]:
        """Run the backward pass; return the sums, 0 where there was no gradient, and sparse gradients as they are.

        Args:
            run: ``tensors -> gradients``.
        """
        self._is_in_backward = True
        run([] if self._source is None else [self._source])
        if self._buckets is not None:
            self._buckets.start_rest(lambda index: self._forms[index].zeros())
            # It refers to this object: the sums would stay in memory until Python collects the cycle.
            self._buckets = None
        while self._started:
            self._finish()
        for indices, over_copies in self._started_over_copies:
            self._add(indices, over_copies())
        self._note_used()
        results = {**self._sums, **self._sparse}
        return [
            results[index] if index in results else torch.zeros_like(param) for index, param in enumerate(self._params)
        ]

    def _read(self, wholes: Sequence[Tensor], complete: Callable[[Sequence[Tensor | None]], None]) -> list[Tensor]:
        """Return tensors with the same values; a function gets their gradients when all are complete."""
        if self._source is None:
            self._source = torch.zeros((), device=wholes[0].device, requires_grad=True)

        def complete_in_backward(grads: Sequence[Tensor | None]) -> None:
            if not self._is_in_backward:
                raise LossError(
                    "sharded: the loss runs a backward pass through its parameters, whose gradients would be sent to "
                    "the other ranks; take the gradients it needs with torch.autograd.grad(output, inputs)"
                )
            complete(grads)

        return list(_Read.apply(complete_in_backward, wholes, self._source))  # type: ignore[no-untyped-call]

    def _take(self, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of a bucket."""
        buckets = cast(BucketOrder, self._buckets)
        for index, grad in zip(indices, grads, strict=True):
            if grad is None:
                continue
            if grad.is_sparse:
                self._sparse[index] = grad
                continue
            self._used.add(index)
            buckets.take(index, grad)
        # With blocks, a bucket would start at another point on a rank that lacks one of its gradients.
        if not self._has_blocks:
            buckets.start_complete()

    def _start(self, combine: Combine, indices: Sequence[int], grads: list[Tensor]) -> None:
        """Start to combine gradients; waits for the oldest if many are being sent."""
        self._started.append((indices, combine(indices, grads)))
        self._nbytes.append(sum(grad.nbytes for grad in grads))
        while len(self._started) > AT_ONCE or sum(self._nbytes) > AT_ONCE_BYTES:
            self._finish()

    def _finish(self) -> None:
        indices, results = self._started.popleft()
        self._nbytes.popleft()
        if self._over_copies is None:
            self._add(indices, results())
        else:
            self._started_over_copies.append((indices, self._over_copies(results())))

    def _add(self, indices: Sequence[int], grads: list[Tensor]) -> None:
        for index, grad in zip(indices, grads, strict=True):
            self._sums[index] = self._sums[index] + grad if index in self._sums else grad

    def _note_used(self) -> None:
        on_rank = unused_on_rank()
        if on_rank is not None:
            on_rank.note_gathered(self._names, [index in self._used for index in range(len(self._names))])


class _Form(NamedTuple):
    """Shape, dtype and device of a gradient, without the memory of its parameter."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class _Read(torch.autograd.Function):
    """Whole tensors; a function gets their gradients when all are complete."""

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


def _plan_of(tensors: Mapping[int, Tensor], smallest: int) -> list[list[int]]:
    sizes = [tensor.numel() for tensor in tensors.values()]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return plan_of([*tensors], [*tensors.values()], sizes, min(max(nbytes // BUCKETS, smallest), LARGEST))
