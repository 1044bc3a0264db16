"""The update arrow: what an optimizer does to a state, and the guards that may refuse it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ftrain import tree
from ftrain.errors import ComposeError
from ftrain.types import Gradients, Hyper, Optimizer, PyTree, TrainState, UpdateFn, replace


def optimize(optimizer: Optimizer) -> UpdateFn:
    """Return the update that an optimizer makes."""

    def update(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        params, opt_state = optimizer.update(gradients.grads, state.opt_state, state.params, hyper, donate=donate)
        slots = {**state.slots, **gradients.accepted_slots} if gradients.accepted_slots else state.slots
        return replace(state, params=params, opt_state=opt_state, buffers=gradients.buffers, slots=slots)

    return update


def guarded(update: UpdateFn, on_finite_check: Mapping[str, Callable[[PyTree, Tensor], PyTree]]) -> UpdateFn:
    """Make an update only when it is accepted, and loss and gradients were finite.

    Args:
        update: what may be refused.
        on_finite_check: by the name of a wrapper, ``(slot, finite) -> slot``, which counts; without one,
            the loss and the gradients are not checked.

    Raises:
        ComposeError: from the update, when a wrapper of the gradient dropped what this needs to know.
    """

    def guarding(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        finite, accept = gradients.finite, gradients.accept
        if on_finite_check and finite is None:
            raise ComposeError("a grad wrapper dropped Gradients.finite, which a guard needs; use dataclasses.replace")
        if finite is not None:
            accept = finite if accept is None else accept & finite
        if accept is None:
            raise ComposeError("a grad wrapper dropped Gradients.accept, which a guard needs; use dataclasses.replace")
        # Not donated: the old values are still needed for the case that the new ones are refused.
        new: TrainState = tree.where(accept, update(state, gradients, hyper, donate=False), state)
        if not on_finite_check or finite is None:
            return new
        counted = {name: count(state.slots[name], finite) for name, count in on_finite_check.items()}
        return replace(new, slots={**new.slots, **counted})

    return guarding
