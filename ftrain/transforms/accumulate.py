"""Gradient accumulation that equals the full batch, however unevenly its weights are spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ftrain import keyed, random, tree
from ftrain.checks import require_positive
from ftrain.errors import BatchError, LossError
from ftrain.types import GradFn, Gradients, Mean, Metrics, PyTree, TrainState, replace
from ftrain.wrapper import Wrapper, wrapper

TOGETHER = 1 << 20
"""Elements of gradients that are weighed together: enough to fill a device, and few beside a model."""


@wrapper
def accumulate(n: int) -> Wrapper:
    r"""Compute the gradient of a batch in `n` equal pieces, one after the other.

    With the weight :math:`w_i` of the `Mean` that microbatch i returns,

    .. math:: g = \sum_i w_i g_i \Big/ \sum_i w_i

    which is the gradient of the full batch for any weights. Every tensor of the batch is cut along
    its first axis; 0-d tensors and other leaves go to every piece. Buffers are handed from piece to
    piece, so that batch statistics are of each piece.

    Dropout is that of the full batch too where it is counter-based: what a loss draws by its own key, with
    `ftrain.random`, and what stock modules draw in a step that is compiled whole. Each example then has the same
    random numbers however the batch is cut; `ftrain.random.for_examples` says which draws are by example. Eagerly
    and in a split-compiled step stock modules draw from torch's generators, each piece after the one before.

    Args:
        n: number of microbatches; divides the first axis of every tensor in the batch.

    Raises:
        OptionError: when `n` is not a positive whole number.
        BatchError: from the step, for an axis that `n` does not divide, or axes of unequal length.
    """
    require_positive("accumulate", "n", n)

    def wrap(grad: GradFn) -> GradFn:
        def accumulating(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            return in_turn(grad, state, split_batch(batch, n), rng)

        return accumulating

    return Wrapper("accumulate", f"accumulate({n})", "grad", grad=wrap, pieces=n)


def in_turn(grad: GradFn, state: TrainState, pieces: Sequence[PyTree], rng: Tensor | None) -> Gradients:
    """Return the gradient of a batch that was cut into pieces, which are taken one after the other."""
    stream, start = keyed.current(), 0
    offset = stream.offset if stream is not None else 0

    def of(state: TrainState, piece: PyTree) -> Gradients:
        nonlocal start
        first, length = start, tree.batch_length(piece) or 1
        start += length
        key = random.for_examples(rng, first, length) if rng is not None else None
        with stream.for_examples(first, length, offset) if stream is not None else nullcontext():
            return grad(state, piece, key)

    total = _weighed(of(state, pieces[0]))
    for piece in pieces[1:]:
        total = _added(total, of(replace(state, buffers=total.buffers), piece))
    return _divided(total, len(pieces))


def split_batch(batch: PyTree, n: int) -> list[PyTree]:
    """Cut every tensor of a batch into `n` equal pieces along its first axis, without copying.

    Raises:
        BatchError: naming the leaf whose axis `n` does not divide, or whose length differs.
    """
    found, spec = tree.flatten(batch)
    _require_even(batch, found, n)
    columns = [leaf.chunk(n) if _has_axis(leaf) else (leaf,) * n for leaf in found]
    return [tree.unflatten(spec, [column[index] for column in columns]) for index in range(n)]


def _has_axis(leaf: Any) -> bool:
    return tree.is_tensor(leaf) and leaf.ndim > 0


def _require_even(batch: PyTree, found: list[Any], n: int) -> None:
    lengths = {index: leaf.shape[0] for index, leaf in enumerate(found) if _has_axis(leaf)}
    if not lengths:
        raise BatchError(f"accumulate({n}): the batch has no tensor with an axis to cut; found {tree.signature(batch)}")
    first = next(iter(lengths))
    for index, length in lengths.items():
        if length == lengths[first] and length % n == 0 and length > 0:
            continue
        names = [tree.path("batch", name) for name in tree.leaf_names(batch)]
        if length != lengths[first]:
            raise BatchError(
                f"accumulate({n}): {names[index]} has {length} examples and {names[first]} has "
                f"{lengths[first]}; all first axes must have the same length"
            )
        raise BatchError(
            f"accumulate({n}): the first axis of {names[index]} has length {length}, which is not a positive "
            f"multiple of {n}; change the batch size or n, or drop the last short batch"
        )


def _weighed(piece: Gradients) -> Gradients:
    """Turn the gradient of a mean into that of the sum, in memory that is this wrapper's own."""
    # One of a plain number is copied too: two parameters may have the same gradient, or one that is part of the batch.
    grads = tree.scale(piece.grads, 1.0 if piece.loss.plain else piece.loss.weight)
    # Of yes and no, too, the mean is taken: their sum would be yes.
    metrics = {
        name: each.float() if isinstance(each, Tensor) and each.dtype == torch.bool else each
        for name, each in piece.metrics.items()
    }
    return replace(piece, grads=grads, metrics=metrics)


def _added(total: Gradients, piece: Gradients) -> Gradients:
    sums, spec = tree.flatten(total.grads)
    grads = tree.leaves(piece.grads)
    # In place, so that one set of sums exists and not two.
    if piece.loss.plain:
        torch._foreach_add_(sums, grads)
    else:
        for part in _parts(sums):
            torch._foreach_add_(sums[part], tree.scale_leaves(grads[part], piece.loss.weight))
    finite = total.finite & piece.finite if total.finite is not None and piece.finite is not None else None
    return Gradients(
        tree.unflatten(spec, sums),
        total.loss + piece.loss,
        _merged(total.metrics, piece.metrics),
        piece.buffers,
        finite,
    )


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


def _merged(total: Metrics, piece: Metrics) -> Metrics:
    if total.keys() != piece.keys():
        raise LossError(f"accumulate: microbatches report different metrics: {sorted(total)} and {sorted(piece)}")
    return {name: total[name] + piece[name] for name in total}


def _divided(total: Gradients, n: int) -> Gradients:
    weight = total.loss.weight
    factor = torch.where(weight == 0, 0.0, 1.0 / weight)
    metrics = {name: m if isinstance(m, Mean) else m / n for name, m in total.metrics.items()}
    sums, spec = tree.flatten(total.grads)
    return replace(total, grads=tree.unflatten(spec, tree.scale_leaves_(sums, factor)), metrics=metrics)
