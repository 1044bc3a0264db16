"""Gradient accumulation that equals the full batch, however unevenly its weights are spread."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ftrain import tree
from ftrain.errors import BatchError, require_positive
from ftrain.step.accumulation import accumulate_grads
from ftrain.step.wrapper import Wrapper, wrapper
from ftrain.types import GradFn, Gradients, PyTree, TrainState


@wrapper
def accumulate(n: int) -> Wrapper:
    r"""Compute the gradient of a batch in `n` equal pieces, one after the other.

    With the weight :math:`w_i` of the `Mean` that microbatch i returns,

    .. math:: g = \sum_i w_i g_i \Big/ \sum_i w_i

    which is the gradient of the full batch for any weights. Every tensor of the batch is cut along
    its first axis; 0-d tensors and other leaves go to every piece. Buffers are handed from piece to
    piece, so that batch statistics are of each piece. The backward pass adds each gradient to its sum as it comes, so
    that one set of gradients exists; where another wrapper sees those of each piece first (`clip` inside), two.

    Dropout is that of the full batch too where it is counter-based: what a loss draws by its own key, with
    `ftrain.random`, and what stock modules draw in a step that is compiled whole. Each example then has the same
    random numbers however the batch is cut; `ftrain.random.for_examples` says which draws are by example. Eagerly
    and in a split-compiled step stock modules draw from torch's generators, each piece after the one before.

    A loss that is a plain number counts once for each microbatch, which is right for a mean over examples. One that is
    a sum, a mean over tokens or a comparison of examples has another gradient in pieces: `fit` evaluates two examples
    together and alone, once, when it first reads metrics, and warns if it is so.

    Args:
        n: number of microbatches; divides the first axis of every tensor in the batch.

    Raises:
        OptionError: when `n` is not a positive whole number.
        BatchError: from the step, for an axis that `n` does not divide, or axes of unequal length.
    """
    require_positive("accumulate", "n", n)

    def wrap(grad: GradFn) -> GradFn:
        def accumulating(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            return accumulate_grads(grad, state, split_batch(batch, n), rng)

        return accumulating

    return Wrapper("accumulate", f"accumulate({n})", "grad", grad=wrap, pieces=n)


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
