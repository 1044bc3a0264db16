"""The same step with another wrapper, or another optimizer, and the state for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ftrain import optim, tree
from ftrain.errors import BatchError, ComposeError, require_order
from ftrain.step.across_ranks import ranks_of
from ftrain.step.microbatch import most_pieces
from ftrain.step.step import Step
from ftrain.step.wrapper import Wrapper
from ftrain.transforms.accumulate import NAME as ACCUMULATE
from ftrain.transforms.accumulate import accumulate
from ftrain.types import PyTree, TrainState, mark_donatable, replace


def require_step(function: str, step: Any, state: Any) -> None:
    """Check that the first arguments of a function are a step and a state.

    Raises:
        ComposeError: naming the function and what was found.
    """
    require_order(function, step, state, f"{function}(step, state, batch)")
    if not isinstance(step, Step):
        raise ComposeError(
            f"{function}: the step is {type(step).__name__}; needs a Step, such as ft.train_step returns"
        )


def require_one_rank(function: str, step: Step) -> None:
    """Check that a step which is to be timed runs on one rank: how often it runs depends on the time that it takes.

    Raises:
        ComposeError: when it runs on several, which would wait for each other in vain.
    """
    if (ranks := ranks_of(step.wrappers)) > 1:
        raise ComposeError(
            f"{function}: the step runs on {ranks} ranks, and cannot be timed there; give it the step without "
            "ft.sharded on one rank, or predict with ft.anatomy(step, state, batch) or ft.tune(..., mesh=(1, "
            f"{ranks}), memory=...)"
        )


def add_wrapper(step: Step, wrapper: Wrapper) -> Step:
    """Return a step with one more wrapper, which replaces one of its name.

    Raises:
        ComposeError: when the step has this wrapper already, or one that it cannot be combined with.
    """
    old = next((other for other in step.wrappers if other.name == wrapper.name), None)
    if old is None:
        if not wrapper.innermost:
            return step.wrapped(wrapper)
        return dataclasses.replace(step, wrappers=(wrapper, *step.wrappers))
    if replaces_optimizer(wrapper) or are_same(wrapper, old):
        raise ComposeError("the step has it already")
    wrappers = tuple(wrapper if other is old else other for other in step.wrappers)
    return dataclasses.replace(step, wrappers=wrappers)


def are_same(wrapper: Wrapper, other: Wrapper) -> bool:
    """Whether two wrappers are known to do the same: by their names and options, or because they are one."""
    if wrapper is other:
        return True
    return wrapper.name == other.name and wrapper.options is not None and wrapper.options == other.options


def replaces_optimizer(wrapper: Wrapper) -> bool:
    """Whether a wrapper has changed the optimizer of its step, so that it cannot be taken out again."""
    return wrapper.update is not None and wrapper.update.optimizer is not None


def remove_wrapper(step: Step, name: str) -> Step:
    """Return a step without the wrapper of a name, if it has it."""
    return dataclasses.replace(step, wrappers=tuple(wrapper for wrapper in step.wrappers if wrapper.name != name))


def microbatches_of(step: Step) -> int:
    """Return in how many pieces a step takes the gradient of a batch.

    Raises:
        ComposeError: when something other than the gradient itself is in pieces.
    """
    readers = [(w.text, w.grad) for w in step.wrappers if w.grad and w.grad.reads_gradients]
    for text, grad in readers:
        if grad.microbatches is not None and grad is not readers[0][1]:
            raise ComposeError(f"{readers[0][0]} is done to every piece of {text}; other pieces change it")
    return step.microbatches


def with_microbatches(step: Step, pieces: int, batch: PyTree) -> Step:
    """Return a step that takes its gradient in so many equal pieces; the same update, if it weighs them.

    Raises:
        ComposeError: when something other than the gradient itself is in pieces.
        BatchError: when the batch has not so many equal pieces.
    """
    microbatches_of(step)
    if pieces == 1:
        return remove_wrapper(step, ACCUMULATE)
    length = length_of(batch)
    if length % pieces:
        raise BatchError(f"a batch of {length} has no {pieces} equal pieces")
    return add_wrapper(step, accumulate(pieces))


def double_batch(batch: PyTree) -> PyTree:
    """Return a batch with each of its examples twice.

    Raises:
        BatchError: when its tensors do not say how many examples it has.
    """
    length, (leaves, spec) = length_of(batch), tree.flatten(batch)
    doubled = [torch.cat([leaf, leaf]) if tree.is_tensor(leaf) and leaf.ndim else leaf for leaf in leaves]
    return tree.unflatten(spec, doubled) if length else batch


def length_of(batch: PyTree) -> int:
    """Return how many examples a batch has.

    Raises:
        BatchError: when its tensors do not say so.
    """
    length = tree.batch_length(batch)
    if length is None or (length > 1 and most_pieces(batch) == 1):
        raise BatchError("the tensors of the batch do not say how many examples it has")
    return length


def smaller_optimizers(step: Step) -> dict[str, Step]:
    """Return steps like one of Adam or AdamW with optimizers that keep less, by how they are written.

    They have its rate, and else their own constants: what is asked of them is how much they take.

    Raises:
        ComposeError: for another optimizer.
    """
    if step.optimizer.name not in ("adam", "adamw") or any(map(replaces_optimizer, step.wrappers)):
        raise ComposeError(f"takes the place of adam or adamw; the step has {step.optimizer.text}")
    rate = step.optimizer.schedules["lr"]
    smaller = {
        'adamw(state_dtype="bf16")': optim.adamw(rate, state_dtype="bf16"),
        "adamw_8bit": optim.adamw_8bit(rate),
        "adafactor": optim.adafactor(rate),
    }
    return {name: dataclasses.replace(step, optimizer=optimizer) for name, optimizer in smaller.items()}


def state_for(variant: Step, original: Step, state: TrainState) -> TrainState:
    """Return a copy of a state as one of a variant; parts that only the variant has start anew.

    Args:
        variant: the step that the new state is for.
        original: the step that the state is of.
        state: the state.

    Raises:
        DeviceError: when the device cannot do what a wrapper needs.
    """
    if variant.optimizer is not original.optimizer:
        state = replace(state, opt_state=None)
    copied = tree.clone(state)
    return mark_donatable(_adopt(variant, original, copied, copied.params))


def outline(variant: Step, original: Step, state: TrainState) -> TrainState:
    """Return what `state_for` does without taking memory: tensors are those of the state, and new ones on ``meta``.

    Raises:
        DeviceError: when the device cannot do what a wrapper needs.
    """
    params = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), state.params)
    return _adopt(variant, original, state, params)


def _adopt(variant: Step, original: Step, state: TrainState, params: PyTree) -> TrainState:
    """Return a state with new parts for the parameters where the variant differs."""
    is_same = variant.optimizer is original.optimizer
    slots = {
        wrapper.name: state.slots[wrapper.name] if wrapper.name in state.slots else wrapper.slot.init(params)
        for wrapper in variant.wrappers
        if wrapper.slot
    }
    opt_state = state.opt_state if is_same else variant.optimizer.init(params)
    adopted = replace(state, opt_state=opt_state, slots=slots)
    variant.require(adopted)
    return adopted
