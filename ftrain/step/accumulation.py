"""The gradient of a batch that comes in pieces, added up piece by piece."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor

from ftrain import _torch, random, tree
from ftrain.errors import LossError
from ftrain.random import torch_ops
from ftrain.step.value_and_grad import Ran, ValueAndGrad, run_backward
from ftrain.types import GradFn, Gradients, Mean, PyTree, TrainState, replace

TOGETHER = 1 << 20
"""Elements of gradients that are weighed together: enough to fill a device, and few beside a model."""


class Sums(Protocol):
    """Adds up gradients, each with the weight of its loss."""

    def add(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        """Add the gradient of a piece, and return what else there is of it."""
        ...

    def mean(self, total: Gradients) -> Gradients:
        """Return the gradient of all pieces, given what else there was of them, added up."""
        ...


@runtime_checkable
class Adding(Protocol):
    """A `GradFn` that can add what it computes to sums."""

    def add(
        self, sums: list[Tensor] | None, state: TrainState, batch: PyTree, rng: Tensor | None
    ) -> tuple[list[Tensor], Gradients]:
        """Return the sums with the gradient of a piece, times its weight, and what else there is of it."""
        ...


def sums(grad: GradFn | Adding, pieces: int) -> Sums:
    """Return what adds up the gradients of so many pieces.

    The sums are the only gradients that exist, but where something is done to those of each piece first.
    """
    if isinstance(grad, Adding):
        return _Added(grad)
    return _Within(grad, pieces) if isinstance(grad, ValueAndGrad) else _After(grad)


class _Within:
    """Lets the backward pass add each gradient to its sum as it comes."""

    _unit: Tensor
    _factor: Tensor | None
    _cotangent: Tensor
    _spec: optree.PyTreeSpec

    def __init__(self, grad: ValueAndGrad, pieces: int) -> None:
        self._grad, self._pieces, self._plain = grad, pieces, True
        # Of a piece, what is kept are the leaves and not the graph.
        self._params: list[Tensor] | None = None

    def add(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        ran = self._grad.forward(state, batch, rng, self._params)
        self._plain &= ran.loss.plain
        if self._params is None:
            self._begin(state, ran)
        else:
            if self._factor is not None and not ran.loss.plain:
                self._enlarge(ran.loss.weight * self._pieces, self._factor)
            run_backward(ran, self._cotangent_of(ran), add=True)
        finite = torch.isfinite(ran.loss.total) if self._grad.watch else None
        return Gradients(None, ran.loss, ran.later(ran.metrics), ran.buffers, finite)

    def _begin(self, state: TrainState, ran: Ran) -> None:
        # In units of the first piece's mean, so that narrow gradients are as large as those of a mean.
        weight = ran.loss.weight
        self._unit = (weight if ran.loss.plain else torch.where(weight == 0, 1.0, weight)) * self._pieces
        self._factor = self._grad.factor(state, ran)
        self._cotangent = (1.0 / self._unit if self._factor is None else self._factor / self._unit).to(ran.total.dtype)
        grads = self._grad.backward(state, ran, self._cotangent_of(ran))
        for leaf, grad in zip(ran.params, _own(grads, ran.params), strict=True):
            leaf.grad = grad
        self._params, self._spec = ran.params, ran.spec

    def _enlarge(self, unit: Tensor, factor: Tensor) -> None:
        # What is scaled is narrow, and that of a piece of much more weight than the first would overflow.
        larger = torch.maximum(self._unit, unit)
        tree.scale_leaves_(self._grads, self._unit / larger)
        self._unit, self._cotangent = larger, (factor / larger).to(self._cotangent.dtype)

    @property
    def _grads(self) -> list[Any]:
        return [leaf.grad for leaf in self._params or ()]

    def _cotangent_of(self, ran: Ran) -> Tensor:
        if ran.loss.plain:
            return self._cotangent
        # What has no weight has no gradient.
        return torch.where(ran.loss.weight == 0, 0.0, self._cotangent)

    def mean(self, total: Gradients) -> Gradients:
        grads = self._grads
        for leaf in self._params or ():
            leaf.grad = None  # Who else has the leaf must not keep it from being given back.
        finite = None if total.finite is None else total.finite & tree.all_finite(grads)
        if not (self._plain and self._factor is None):
            ratio = _safely(self._unit, total.loss.weight)
            tree.scale_leaves_(grads, ratio if self._factor is None else ratio / self._factor)
        return replace(total, grads=tree.unflatten(self._spec, grads), finite=finite)


class _After:
    """Adds the gradients of a piece when all of them are there, and something was done to them."""

    _sums: list[Tensor] | None = None

    def __init__(self, grad: GradFn) -> None:
        self._grad = grad

    def add(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        piece = self._grad(state, batch, rng)
        grads, self._spec = tree.flatten(piece.grads)
        weight, plain = piece.loss.weight, piece.loss.plain
        if self._sums is None:
            # Of a plain number, too, they are copied: they may be memory of others.
            self._sums = tree.scale_leaves(grads, 1.0 if plain else weight)
        elif plain:
            torch._foreach_add_(self._sums, grads)
        else:
            for part in _parts(self._sums):
                torch._foreach_add_(self._sums[part], tree.scale_leaves(grads[part], weight))
        return replace(piece, grads=None)

    def mean(self, total: Gradients) -> Gradients:
        weight = total.loss.weight
        grads = tree.scale_leaves_(self._sums or [], _safely(torch.ones_like(weight), weight))
        return replace(total, grads=tree.unflatten(self._spec, grads))


class _Added(_After):
    """Lets the function that computes a gradient add it."""

    def __init__(self, grad: Adding) -> None:
        self._adding = grad

    def add(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        self._spec = tree.flatten(state.params)[1]
        self._sums, piece = self._adding.add(self._sums, state, batch, rng)
        return piece


def _safely(unit: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, unit / weight)


def _own(grads: Iterable[Tensor], leaves: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield gradients whose memory is theirs alone and laid out like the leaves; copies of those that are otherwise."""
    known = set[int]()
    for grad, leaf in zip(grads, leaves, strict=True):
        memory = grad.untyped_storage()
        shared = _torch.storage_id(grad) in known or memory.nbytes() != grad.nbytes or grad.stride() != leaf.stride()
        yield torch.empty_like(leaf).copy_(grad) if shared else grad
        known.add(_torch.storage_id(grad))


def _parts(leaves: list[Tensor]) -> Iterator[slice]:
    """Cut a list of tensors into parts of some elements, so that few of them exist twice at a time."""
    start = size = 0
    for index, leaf in enumerate(leaves):
        if size and size + leaf.numel() > TOGETHER:
            yield slice(start, index)
            start, size = index, 0
        size += leaf.numel()
    if start < len(leaves):
        yield slice(start, len(leaves))


def accumulate_grads(grad: GradFn, state: TrainState, pieces: Sequence[PyTree], rng: Tensor | None) -> Gradients:
    """Return the gradient of a batch that was cut into pieces, which are taken one after the other."""
    stream, start = torch_ops.current(), 0
    offset = stream.offset if stream is not None else 0

    adding, found = sums(grad, len(pieces)), list[Gradients]()
    for piece in pieces:
        first, length = start, tree.batch_length(piece) or 1
        start += length
        key = random.for_examples(rng, first, length) if rng is not None else None
        with stream.for_examples(first, length, offset) if stream is not None else nullcontext():
            found.append(adding.add(state, piece, key))
        state = replace(state, buffers=found[-1].buffers)
    return _averaged(adding.mean(functools.reduce(_merged, found[1:], _first(found[0]))), len(pieces))


def _first(piece: Gradients) -> Gradients:
    # Of yes and no, too, the mean is taken: their sum would be yes.
    metrics = {
        name: each.float() if isinstance(each, Tensor) and each.dtype == torch.bool else each
        for name, each in piece.metrics.items()
    }
    return replace(piece, metrics=metrics)


def _merged(total: Gradients, piece: Gradients) -> Gradients:
    if total.metrics.keys() != piece.metrics.keys():
        raise LossError(
            f"accumulate: microbatches report different metrics: {sorted(total.metrics)} and {sorted(piece.metrics)}"
        )
    metrics = {name: total.metrics[name] + piece.metrics[name] for name in total.metrics}
    finite = total.finite & piece.finite if total.finite is not None and piece.finite is not None else None
    return Gradients(None, total.loss + piece.loss, metrics, piece.buffers, finite)


def _averaged(total: Gradients, n: int) -> Gradients:
    metrics = {name: m if isinstance(m, Mean) else m / n for name, m in total.metrics.items()}
    return replace(total, metrics=metrics)
