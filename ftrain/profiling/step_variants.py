"""Variants of a step, with another wrapper or optimizer, and of a batch, with more or fewer examples."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import torch

from ftrain import optim, tree
from ftrain.errors import BatchError, ComposeError, require_order
from ftrain.step.across_ranks import ranks_of
from ftrain.step.microbatch import lengths_of, most_pieces, repeat_examples
from ftrain.step.state_checks import require_state
from ftrain.step.step import Step
from ftrain.step.wrapper import Wrapper
from ftrain.transforms.accumulate import NAME as ACCUMULATE
from ftrain.transforms.accumulate import accumulate
from ftrain.tree.wrapped_tensors import plain_tensors
from ftrain.types import PyTree

_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}
"""Layout of a sparse tensor -> its methods that return the dense tensors in it."""


def require_step(function: str, step: Any, state: Any, *, may_lack_state: bool = False) -> None:
    """Raises a ComposeError or a StructureError unless the first arguments of a function are a step and its state."""
    require_order(function, step, state, f"{function}(step, state, batch)")
    if not isinstance(step, Step):
        raise ComposeError(
            f"{function}: the step is {type(step).__name__}; needs a Step, such as ft.train_step returns"
        )
    if not (may_lack_state and state is None):
        require_state(function, state)
        step.require(state)


def require_one_rank(function: str, step: Step) -> None:
    """Raises a ComposeError for a step on several ranks: if one ran it more often than another, all would hang."""
    ranks = ranks_of(step.wrappers)
    if ranks > 1:
        raise ComposeError(
            f"{function}: the step runs on {ranks} ranks and cannot be timed there; pass it without ft.sharded on one "
            f"rank, or predict with ft.anatomy(step, state, batch) or ft.tune(..., mesh=(1, {ranks}), memory=...)"
        )


def add_wrapper(step: Step, wrapper: Wrapper) -> Step:
    """Return a step with one more wrapper, in place of the wrapper of the same name if there is one.

    Raises a ComposeError if the step has the same wrapper already, or one that cannot be combined with it.
    """
    old = next((other for other in step.wrappers if other.name == wrapper.name), None)
    if old is None:
        if not wrapper.innermost:
            return step.wrapped(wrapper)
        return dataclasses.replace(step, wrappers=(wrapper, *step.wrappers))
    is_same = wrapper is old or (wrapper.options is not None and wrapper.options == old.options)
    if is_same or replaces_optimizer(wrapper):
        raise ComposeError("the step has it already")
    wrappers = tuple(wrapper if other is old else other for other in step.wrappers)
    return dataclasses.replace(step, wrappers=wrappers)


def replaces_optimizer(wrapper: Wrapper) -> bool:
    """Whether a wrapper has replaced the optimizer of its step, so that a step without it keeps the new optimizer."""
    return wrapper.update is not None and wrapper.update.optimizer is not None


def remove_wrapper(step: Step, name: str) -> Step:
    """Return a step without the wrapper of a name."""
    return dataclasses.replace(step, wrappers=tuple(wrapper for wrapper in step.wrappers if wrapper.name != name))


def microbatches_of(step: Step) -> int:
    """Return the number of microbatches over which a step accumulates its gradient.

    Raises a ComposeError if a wrapper changes the gradient of each microbatch, so that another number of microbatches
    would be another update.
    """
    readers = [
        (wrapper.text, wrapper.grad) for wrapper in step.wrappers if wrapper.grad and wrapper.grad.reads_gradients
    ]
    for text, grad in readers[1:]:
        if grad.microbatches is not None:
            innermost, _ = readers[0]
            raise ComposeError(
                f"{innermost} applies to each microbatch of {text}; another number of them is another update"
            )
    return step.microbatches


def with_microbatches(step: Step, microbatches: int, batch: PyTree) -> Step:
    """Return a step that computes the same update in this number of equal microbatches.

    Raises a BatchError if the number does not divide the batch, and the error of `microbatches_of`.
    """
    if microbatches == microbatches_of(step):
        return step
    if microbatches == 1:
        return remove_wrapper(step, ACCUMULATE)
    length = length_of(batch)
    if length % microbatches:
        raise BatchError(f"{microbatches} microbatches do not divide a batch of {length} examples")
    return add_wrapper(step, accumulate(microbatches))


def double_batch(batch: PyTree) -> PyTree:
    """Return a batch that has each example twice; raises as `length_of`."""
    return repeat_examples(batch, 2) if length_of(batch) else batch


def length_of(batch: PyTree) -> int:
    """Return the number of examples of a batch. Raises a BatchError if its tensors do not agree on it."""
    lengths = lengths_of(tree.leaves(batch))
    length = max(lengths, default=0)
    if len(lengths) != 1 or (length > 1 and most_pieces(batch) == 1):
        raise BatchError("the tensors of the batch do not say how many examples it has")
    return length


def length_or_none(batch: PyTree) -> int | None:
    """Return the number of examples of a batch; None if its tensors do not agree on it."""
    with suppress(BatchError):
        return length_of(batch)
    return None


def nbytes(values: PyTree) -> int:
    """Return the bytes of the tensors of a tree."""
    tensors = [leaf for leaf in tree.leaves(values) if tree.is_tensor(leaf)]
    return sum(_nbytes(plain) for tensor in tensors for plain in plain_tensors(tensor))


def _nbytes(leaf: torch.Tensor) -> int:
    parts = SPARSE_PARTS.get(leaf.layout)
    return leaf.nbytes if parts is None else sum(getattr(leaf, part)().nbytes for part in parts)


def smaller_optimizers(step: Step) -> dict[str, Step]:
    """Return variants of a step with Adam or AdamW, with optimizers of a smaller state, by the text of their calls.

    The optimizers have the learning rate of the step and default options, which do not change their memory. Raises a
    ComposeError if the step has another optimizer.
    """
    replacing = [wrapper.text for wrapper in step.wrappers if replaces_optimizer(wrapper)]
    if step.optimizer.name not in ("adam", "adamw") or replacing:
        raise ComposeError(f"replaces adam or adamw; the step has {' and '.join([step.optimizer.text, *replacing])}")
    rate = step.optimizer.schedules["lr"]
    smaller = {
        'adamw(state_dtype="bf16")': optim.adamw(rate, state_dtype="bf16"),
        "adamw_8bit": optim.adamw_8bit(rate),
        "adafactor": optim.adafactor(rate),
    }
    return {name: dataclasses.replace(step, optimizer=optimizer) for name, optimizer in smaller.items()}
