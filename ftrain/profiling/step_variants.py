"""The same step with another wrapper, or another optimizer, and the state for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ftrain import optim, tree
from ftrain.errors import BatchError, ComposeError
from ftrain.step.microbatch import most_pieces
from ftrain.step.step import Step
from ftrain.step.wrapper import Wrapper
from ftrain.transforms.accumulate import accumulate
from ftrain.types import PyTree, TrainState, own, replace

INNERMOST = "remat", "accumulate"
"""What acts on less when it stands inside of the others: on the model alone, and not on what clips each piece."""


def having(step: Step, wrapper: Wrapper) -> Step:
    """Return a step with one more wrapper, which takes the place of one of its name.

    Raises:
        ComposeError: when the step has this wrapper already, or one with which it does not go.
    """
    there = any(other.name == wrapper.name for other in step.wrappers)
    if not there and wrapper.name not in INNERMOST:
        return step.wrapped(wrapper)
    if there and wrapper.optimizer:
        raise ComposeError("the step has it already")
    others = tuple(wrapper if other.name == wrapper.name else other for other in step.wrappers)
    made = dataclasses.replace(step, wrappers=others if there else (wrapper, *others))
    if texts(made) == texts(step):
        raise ComposeError("the step has it already")
    return made


def texts(step: Step) -> list[str]:
    """Return how the wrappers of a step print; those of the loss as it has them, for it knows its blocks."""
    rest = [each.text for each in step.wrappers if each.arrow != "loss"]
    return [*step.loss.text.split(" <- ")[1:], *rest]


def without(step: Step, name: str) -> Step:
    """Return a step without the wrapper of a name, if it has it."""
    return dataclasses.replace(step, wrappers=tuple(each for each in step.wrappers if each.name != name))


def pieces_of(step: Step) -> int:
    """Return in how many pieces a step takes its gradient.

    Raises:
        ComposeError: when something other than the gradient itself is in pieces.
    """
    done = [each for each in step.wrappers if each.grad and each.reads_gradients]
    found = next((each for each in done if each.pieces), None)
    if found and found is not done[0]:
        raise ComposeError(f"{done[0].text} is done to every piece of {found.text}; other pieces change it")
    return found.pieces if found and found.pieces else 1


def in_pieces_of(step: Step, pieces: int, batch: PyTree) -> Step:
    """Return a step that takes its gradient in so many equal pieces; the same update, if it weighs them.

    Raises:
        ComposeError: when something other than the gradient itself is in pieces.
        BatchError: when the batch has not so many equal pieces.
    """
    pieces_of(step)
    if pieces == 1:
        return without(step, "accumulate")
    length = length_of(batch)
    if length % pieces:
        raise BatchError(f"a batch of {length} has no {pieces} equal pieces")
    return having(step, accumulate(pieces))


def twice(batch: PyTree) -> PyTree:
    """Return a batch with each of its examples twice.

    Raises:
        BatchError: when its tensors do not say how many examples it has.
    """
    length, (found, spec) = length_of(batch), tree.flatten(batch)
    doubled = [torch.cat([leaf, leaf]) if tree.is_tensor(leaf) and leaf.ndim else leaf for leaf in found]
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
    text = step.optimizer.text
    if not text.startswith(("adam(", "adamw(")) or any(wrapper.optimizer for wrapper in step.wrappers):
        raise ComposeError(f"takes the place of adam or adamw; the step has {text}")
    rate = step.optimizer.schedules["lr"]
    made = {
        'adamw(state_dtype="bf16")': optim.adamw(rate, state_dtype="bf16"),
        "adamw_8bit": optim.adamw_8bit(rate),
        "adafactor": optim.adafactor(rate),
    }
    return {name: dataclasses.replace(step, optimizer=optimizer) for name, optimizer in made.items()}


def state_for(step: Step, given: Step, state: TrainState) -> TrainState:
    """Return a copy of a state of one step as a state of another; what only the other keeps starts anew.

    Args:
        step: the other step.
        given: the step that the state is of.
        state: the state.

    Raises:
        DeviceError: when the device cannot do what a wrapper needs.
    """
    rest = tree.clone(replace(state, opt_state=None, slots={}))
    made = _adopted(step, given, state, rest, rest.params, tree.clone)
    step.require(made)
    return own(made)


def outline(step: Step, given: Step, state: TrainState) -> TrainState:
    """Return what `state_for` does without taking memory: tensors are those of the state, and new ones on ``meta``.

    Raises:
        DeviceError: when the device cannot do what a wrapper needs.
    """
    params = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), state.params)
    made = _adopted(step, given, state, state, params, lambda kept: kept)
    step.require(made)
    return made


def _adopted(
    step: Step, given: Step, state: TrainState, rest: TrainState, params: PyTree, copy: Callable[[PyTree], PyTree]
) -> TrainState:
    same = step.optimizer is given.optimizer
    slots = {each.name: each.slot for each in step.wrappers if each.slot}
    return replace(
        rest,
        opt_state=copy(state.opt_state) if same else step.optimizer.init(params),
        slots={name: copy(state.slots[name]) if name in state.slots else slots[name](params) for name in slots},
    )
