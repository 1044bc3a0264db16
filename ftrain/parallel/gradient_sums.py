"""Sums of gradients over ranks, which start in the backward pass when gradients are complete, and end with it.

Two nodes of autograd stand between the parameters and a loss. The one at the loss starts to combine their gradients,
and the one at the parameters returns the results. As that one is the oldest node of the graph, autograd runs it last:
what is started travels while the rest of the backward pass runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain.parallel.partition import Results, buckets
from ftrain.step.unused_params import watching

AT_ONCE = 2
"""Buffers that travel at a time: more would take more memory."""

SMALLEST, BUCKETS, LARGEST = 1 << 20, 4, 32 << 20
"""Bytes of the smallest and the largest bucket, and how many buckets there are between these limits."""

Combine: TypeAlias = Callable[[Sequence[int], list[Tensor]], Results]
"""``(indices, gradients) -> results``: starts to combine the gradients of the parameters of these indices."""


class GradientSums:
    """The gradients of the parameters of one forward pass.

    Args:
        names: of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._started: deque[tuple[Sequence[int], Results]] = deque()
        self._sums: dict[int, Tensor] = {}
        self._buckets: list[_InOrder] = []

    def entered(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters, whose gradients are the sums of what `start` is called for."""
        return list(_Results.apply(self, *params))  # type: ignore[no-untyped-call]

    def start(self, indices: Sequence[int], results: Results) -> None:
        """Take what was started for the gradients of some parameters; waits for the oldest if they are many."""
        self._started.append((indices, results))
        while len(self._started) > AT_ONCE:
            self._finish()

    def results(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums, of 0 where there was no gradient."""
        for each in self._buckets:
            each.start_rest()
        while self._started:
            self._finish()
        sums = [self._sums.get(index) for index in range(len(params))]
        # This object is part of a cycle of references, and would keep them until Python collects it.
        self._sums, self._buckets = {}, []
        unused = [self._names[index] for index, each in enumerate(sums) if each is None]
        _note(unused, [False for _ in unused])
        return [torch.zeros_like(param) if each is None else each for each, param in zip(sums, params, strict=True)]

    def _finish(self) -> None:
        indices, results = self._started.popleft()
        for index, grad in zip(indices, results(), strict=True):
            self._sums[index] = self._sums[index] + grad if index in self._sums else grad

    def at_once(
        self, entered: Sequence[Tensor], wholes: Sequence[Tensor], indices: Sequence[int], combine: Combine
    ) -> list[Tensor]:
        """Return whole tensors as functions of entered ones; their gradients travel when all are complete.

        Args:
            entered: what `entered` returned for the parameters of these indices.
            wholes: the tensors that the loss reads: the entered ones, or what was gathered of them.
            indices: of the parameters.
            combine: gets the gradients of `wholes`.
        """

        def complete(grads: list[Tensor]) -> None:
            self.start(indices, combine(indices, grads))

        names = [self._names[index] for index in indices]
        return list(_Start.apply(complete, names, wholes, *entered))  # type: ignore[no-untyped-call]

    def in_buckets(
        self,
        entered: Sequence[Tensor],
        wholes: Mapping[int, Tensor],
        plan: Sequence[Sequence[int]],
        combine: Combine,
    ) -> dict[int, Tensor]:
        """As `at_once`, for each of several buckets, which all ranks start in the same order whatever they use.

        Args:
            entered: what `entered` returned for all parameters.
            wholes: the tensors that the loss reads, by the indices of their parameters.
            plan: the indices of each bucket, in the order in which they are complete.
            combine: gets the gradients of the `wholes` of one bucket.
        """
        order = _InOrder(plan, self._names, wholes, lambda indices, grads: self.start(indices, combine(indices, grads)))
        self._buckets.append(order)
        results: dict[int, Tensor] = {}
        for number, indices in enumerate(plan):
            function: Any = partial(
                _Start.apply,
                order.completing(number),
                [self._names[i] for i in indices],
                [wholes[index] for index in indices],
            )
            results.update(zip(indices, function(*[entered[index] for index in indices]), strict=True))
        return results


class _Form(NamedTuple):
    """What a gradient is like, without the memory of its parameter."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def _note(names: Sequence[str], are_used: Sequence[bool]) -> None:
    on_rank = watching()
    if on_rank is not None:
        on_rank.note_gathered(names, are_used)


class _InOrder:
    """Starts buckets in their order, each when it and those before it are complete."""

    def __init__(
        self,
        plan: Sequence[Sequence[int]],
        names: Sequence[str],
        wholes: Mapping[int, Tensor],
        start: Callable[[Sequence[int], list[Tensor]], None],
    ) -> None:
        self._plan, self._names, self._start = plan, names, start
        self._forms = {index: _Form.of(whole) for index, whole in wholes.items()}
        self._complete: dict[int, list[Tensor]] = {}
        self._next = 0

    def completing(self, number: int) -> Callable[[list[Tensor]], None]:
        """Return the function that takes the gradients of a bucket."""

        def complete(grads: list[Tensor]) -> None:
            self._complete[number] = grads
            while self._next in self._complete:
                self._start_next(self._complete.pop(self._next))

        return complete

    def start_rest(self) -> None:
        """Start the buckets of which this rank has no gradient, and those behind them."""
        while self._next < len(self._plan):
            indices = self._plan[self._next]
            if self._next not in self._complete:
                _note([self._names[index] for index in indices], [False for _ in indices])
            zeros = [self._forms[index].zeros() for index in indices]
            self._start_next(self._complete.pop(self._next, zeros))

    def _start_next(self, grads: list[Tensor]) -> None:
        self._next += 1
        self._start(self._plan[self._next - 1], grads)


class _Results(torch.autograd.Function):
    """The identity, whose gradient is what `GradientSums` has."""

    @staticmethod
    def forward(ctx: Any, sums: GradientSums, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.params = sums, [param.detach() for param in params]
        return params

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Any, ...]:
        return None, *ctx.sums.results(ctx.params)


class _Start(torch.autograd.Function):
    """Whole tensors, of which a function gets the gradients; it is `_Results` that returns them."""

    @staticmethod
    def forward(
        ctx: Any,
        complete: Callable[[list[Tensor]], None],
        names: Sequence[str],
        wholes: Sequence[Tensor],
        *entered: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.complete, ctx.names, ctx.forms = complete, names, [_Form.of(whole) for whole in wholes]
        return tuple(whole.detach() for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _note(ctx.names, [grad is not None for grad in grads])
        pairs = zip(grads, ctx.forms, strict=True)
        ctx.complete([form.zeros() if grad is None else grad for grad, form in pairs])
        return None, None, None, *(None for _ in grads)


def plan_of(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Return the indices of each bucket, for tensors in the order of their use: gradients come the other way."""
    backwards = [*tensors][::-1]
    last_first = [tensors[index] for index in backwards]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in last_first)
    limit = min(max(nbytes // BUCKETS, SMALLEST), LARGEST)
    return [
        [backwards[member] for member in members]
        for members in buckets(last_first, [tensor.numel() for tensor in last_first], limit)
    ]
