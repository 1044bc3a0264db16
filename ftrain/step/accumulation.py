"""Gradient accumulation: compute and sum the gradient of a batch microbatch by microbatch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Number
from typing import Any

import optree
import torch
from torch import Tensor

from ftrain import _torch, random, tree
from ftrain.errors import LossError
from ftrain.random import torch_ops
from ftrain.step.forward import ForwardResult
from ftrain.step.loss_forms import as_float, summable
from ftrain.step.microbatch import within_piece
from ftrain.step.value_and_grad import ValueAndGrad, around_forward, run_backward
from ftrain.types import GradFn, Gradients, Mean, Metrics, PyTree, TrainState, replace


class _InBackward:
    """Lets the backward pass add each gradient to the `.grad` of its leaf, so that only the sums are in memory."""

    def __init__(self, grad: ValueAndGrad, pieces: int) -> None:
        self._grad, self._pieces, self._plain = grad, pieces, True
        # The leaves of the first microbatch, whose `.grad` holds the sums.
        self._params: list[Tensor] | None = None

    def add(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        """Add the gradient of a microbatch, and return its `Gradients` without it."""
        # The sums are removed during the forward pass: a loss that calls `backward` itself would change them.
        sums = self._grads
        for leaf in self._params or ():
            leaf.grad = None
        result = self._grad.forward(state, batch, rng, self._params)
        for leaf, grad_sum in zip(self._params or (), sums, strict=True):
            leaf.grad = grad_sum
        self._plain &= result.loss.plain
        if self._params is None:
            self._begin(state, result)
        else:
            if self._factor is not None and not result.loss.plain:
                self._enlarge(result.loss.weight * self._pieces, self._factor)
            run_backward(result, self._cotangent_of(result), add=True)
        self._separate_new()
        finite = torch.isfinite(result.loss.total) if self._grad.reports_finite else None
        return Gradients(None, result.loss, result.finish_metrics(result.metrics), result.buffers, finite)

    def _begin(self, state: TrainState, result: ForwardResult) -> None:
        """Choose the unit of the sums, and run the backward pass of the first microbatch."""
        # The sums are divided by the weight of the first microbatch and by the number of microbatches, so that they
        # are about as large as gradients of a mean: in float16, sums of totals would overflow.
        weight = result.loss.weight
        if not result.loss.plain:
            weight = torch.where(weight == 0, 1.0, weight)
        self._unit = weight * self._pieces
        self._factor = self._grad.factor(state, result)
        factor = 1.0 if self._factor is None else self._factor
        self._cotangent = (factor / self._unit).to(result.total.dtype)
        for leaf in result.params:
            leaf.grad = None  # A loss that calls `backward` itself has set it.
        # Autograd copies a gradient for `.grad` that something else refers to, such as the cotangent or a saved tensor.
        run_backward(result, self._cotangent_of(result), add=True)
        self._params, self._unused, self._spec = result.params, result.params, result.spec
        # A parameter is unused if no microbatch uses it, which is known at the end. The graph is not kept until then.
        without_graph = replace(result, total=result.loss.total, combined=None)
        self._filled = partial(self._grad.filled, state, without_graph)

    def _separate_new(self) -> None:
        """Move gradients that this microbatch computed first to separate memory, where they can be added to."""
        new = [leaf for leaf in self._unused if leaf.grad is not None and not leaf.grad.is_sparse]
        grads: list[Any] = [leaf.grad for leaf in new]
        for leaf, grad in zip(new, _in_own_memory(grads, new), strict=True):
            leaf.grad = grad
        self._unused = [leaf for leaf in self._unused if leaf.grad is None]

    def _enlarge(self, unit: Tensor, factor: Tensor) -> None:
        """Rescale the sums to a larger unit, so that a microbatch with much more weight does not overflow in float16.

        It does nothing if `unit` is not larger than the current unit.
        """
        larger = torch.maximum(self._unit, unit)
        tree.scale_leaves_([grad for grad in self._grads if grad is not None], self._unit / larger)
        self._unit, self._cotangent = larger, (factor / larger).to(self._cotangent.dtype)

    @property
    def _grads(self) -> list[Any]:
        return [leaf.grad for leaf in self._params or ()]

    def _cotangent_of(self, result: ForwardResult) -> Tensor:
        if result.loss.plain:
            return self._cotangent
        # With a weight of 0 the gradient is 0.
        return torch.where(result.loss.weight == 0, 0.0, self._cotangent)

    def mean(self, total: Gradients) -> Gradients:
        """Return the gradient of the whole batch; `total` is the sum of the results of `add`."""
        grads = self._filled(tuple(self._grads))
        for leaf in self._params or ():
            leaf.grad = None  # Other references to the leaf must not keep the gradient alive.
        finite = None if total.finite is None else total.finite & tree.all_finite(grads)
        if not (self._plain and self._factor is None):
            ratio = _ratio(self._unit, total.loss.weight)
            tree.scale_leaves_(grads, ratio if self._factor is None else ratio / self._factor)
        return replace(total, grads=tree.unflatten(self._spec, grads), finite=finite)


class _AfterBackward:
    """Adds the gradients of a microbatch after its backward pass, as the wrappers inside `accumulate` changed them.

    A gradient function with the method ``add(sums, state, batch, rng) -> (sums, structure, results)`` adds them itself.
    """

    def __init__(self, grad: GradFn) -> None:
        self._add: Callable[..., tuple[list[Tensor], Any, Gradients]] = getattr(grad, "add", partial(_add, grad))
        self._sums: list[Tensor] | None = None

    def add(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        self._sums, self._spec, piece = self._add(self._sums, state, batch, rng)
        return piece

    def mean(self, total: Gradients) -> Gradients:
        weight = total.loss.weight
        grads = tree.scale_leaves_(self._sums or [], _ratio(torch.ones_like(weight), weight))
        return replace(total, grads=tree.unflatten(self._spec, grads))


def _add(
    grad: GradFn, sums: list[Tensor] | None, state: TrainState, batch: PyTree, rng: Tensor | None
) -> tuple[list[Tensor], optree.PyTreeSpec, Gradients]:
    piece = grad(state, batch, rng)
    grads, spec = tree.flatten(piece.grads)
    weight, plain = piece.loss.weight, piece.loss.plain
    if sums is None:
        # Copied for a plain loss too: the gradients may share memory with other tensors.
        sums = tree.scale_leaves(grads, 1.0 if plain else weight)
    elif plain:
        torch._foreach_add_(sums, grads)
    else:
        for part in tree.slices(sums):
            torch._foreach_add_(sums[part], tree.scale_leaves(grads[part], weight))
    return sums, spec, replace(piece, grads=None)


def _ratio(unit: Tensor, weight: Tensor) -> Tensor:
    """Return ``unit / weight``; 0 if the weight is 0."""
    return torch.where(weight == 0, 0.0, unit / weight)


def _in_own_memory(grads: Iterable[Tensor], leaves: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield gradients with their own memory and the strides of their leaves, copied if necessary."""
    known_storages = set[int]()
    for grad, leaf in zip(grads, leaves, strict=True):
        storage_id = _torch.storage_id(grad)
        is_shared = storage_id in known_storages or grad.untyped_storage().nbytes() != grad.nbytes
        yield torch.empty_like(leaf).copy_(grad) if is_shared or grad.stride() != leaf.stride() else grad
        known_storages.add(storage_id)


def accumulate_grads(grad: GradFn, state: TrainState, pieces: Sequence[PyTree], rng: Tensor | None) -> Gradients:
    """Return the gradient of a batch that is split into microbatches.

    A loss or metric that is a plain number counts once per microbatch if all have the same length, else once per
    example. Raises a LossError if microbatches report different metrics, or one that is not a tensor, `Mean` or number.
    """
    # Torch's random operations draw from it in a step; None if they draw from torch's generators.
    keyed = torch_ops.current()
    offset = keyed.offset if keyed is not None else 0
    lengths = [tree.batch_length(piece) or 1 for piece in pieces]
    if len(set(lengths)) > 1:
        grad = around_forward(grad, _by_example)
    # It sums the gradients of microbatches, weighted by the weights of their losses.
    accumulated = _InBackward(grad, len(pieces)) if isinstance(grad, ValueAndGrad) else _AfterBackward(grad)
    results: list[Gradients] = []
    start = 0
    for piece, length in zip(pieces, lengths, strict=True):
        key = random.for_examples(rng, start, length) if rng is not None else None
        drawing = keyed.for_examples(start, length, offset) if keyed is not None else nullcontext()
        with drawing, within_piece(len(pieces), start):
            results.append(accumulated.add(state, piece, key))
        state = _next_state(state, results[-1])
        start += length
    total = functools.reduce(_merged, results[1:], _first(results[0]))
    metrics = {name: m if isinstance(m, Mean) else _divided(m, len(pieces)) for name, m in total.metrics.items()}
    return replace(accumulated.mean(total), metrics=metrics)


def _next_state(state: TrainState, piece: Gradients) -> TrainState:
    """Return the state for the next microbatch: with the buffers and slots that the last one returned."""
    slots = {**state.slots, **piece.slots, **piece.accepted_slots}
    return replace(state, buffers=piece.buffers, slots=slots)


def _divided(metric: Any, number: int) -> Any:
    return (as_float(metric) if isinstance(metric, Tensor) else metric) / number


def _require_numbers(metrics: Metrics) -> None:
    for name, metric in metrics.items():
        if not isinstance(metric, Mean | Tensor | Number):
            raise LossError(
                f"accumulate: the metric {name!r} is {tree.describe(metric)}; needs a tensor, a Mean or a number, "
                "which can be averaged over microbatches"
            )


def _shape(metric: Any) -> tuple[int, ...]:
    value = metric.total if isinstance(metric, Mean) else metric
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _first(piece: Gradients) -> Gradients:
    """Return the results of the first microbatch, in dtypes in which those of the others can be added."""
    _require_numbers(piece.metrics)
    # Integers as floats: a sum of large ones would wrap around.
    metrics = {name: summable(as_float(m)) if isinstance(m, Tensor) else m for name, m in piece.metrics.items()}
    return replace(piece, metrics=metrics, loss=replace(piece.loss, total=summable(piece.loss.total)))


def _merged(total: Gradients, piece: Gradients) -> Gradients:
    """Return the results of several microbatches, with those of one more added; without gradients."""
    if total.metrics.keys() != piece.metrics.keys():
        raise LossError(
            f"accumulate: microbatches report different metrics: {sorted(total.metrics)} and {sorted(piece.metrics)}; "
            "return the same metrics for every batch"
        )
    for name, metric in total.metrics.items():
        if _shape(metric) != _shape(piece.metrics[name]):  # Shapes that broadcast would give a sum without an error.
            raise LossError(
                f"accumulate: the metric {name!r} has the shape {[*_shape(metric)]} in one microbatch, and "
                f"{[*_shape(piece.metrics[name])]} in another; return its mean, or a tensor of one shape for every "
                "batch"
            )
    metrics = {
        name: metric.pooled(piece.metrics[name]) if isinstance(metric, Mean) else metric + piece.metrics[name]
        for name, metric in total.metrics.items()
    }
    return Gradients(
        None,
        total.loss.pooled(piece.loss),
        metrics,
        piece.buffers,
        _both(total.finite, piece.finite),
        accept=_both(total.accept, piece.accept),
        slots={**total.slots, **piece.slots},
        accepted_slots={**total.accepted_slots, **piece.accepted_slots},
    )


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return whether both are true; None if one is None."""
    return first & second if first is not None and second is not None else None


def _by_example(run: Callable[..., Any]) -> Callable[..., Any]:
    """Weight losses and metrics that are plain numbers by the number of examples. A `Mean` keeps its weight.

    `run` is ``(state, batch, ...) -> result``: a forward pass, or a `GradFn` whose forward pass cannot be called alone.
    """

    def weighing(state: TrainState, batch: PyTree, *more: Any) -> Any:
        result = run(state, batch, *more)
        loss = result.loss
        weight = torch.full_like(loss.weight, tree.batch_length(batch) or 1)
        if loss.plain:
            loss = Mean(loss.total * weight, loss.weight * weight)

        def weigh(metrics: Metrics) -> Metrics:
            _require_numbers(metrics)
            floats = {name: as_float(m) if isinstance(m, Tensor) else m for name, m in metrics.items()}
            return {name: m if isinstance(m, Mean) else Mean(m * weight, weight) for name, m in floats.items()}

        if not isinstance(result, ForwardResult):
            return replace(result, loss=loss, metrics=weigh(result.metrics))
        with torch.enable_grad():
            total = result.total * weight if result.loss.plain else result.total

        def finish_metrics(metrics: Metrics) -> Metrics:
            return weigh(result.finish_metrics(metrics))

        return replace(result, total=total, loss=loss, finish_metrics=finish_metrics)

    return weighing
