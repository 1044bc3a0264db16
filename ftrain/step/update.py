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
        return replace(state, params=params, opt_state=opt_state, buffers=gradients.buffers)

    return update


def guarded(update: UpdateFn, guards: Mapping[str, Callable[[PyTree, Tensor], PyTree]]) -> UpdateFn:
    """Take an update only when loss and gradients were finite, and let the guards count.

    Raises:
        ComposeError: from the update, when a wrapper lost sight of whether the gradients are finite.
    """

    def guarding(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        finite = gradients.finite
        if finite is None:
            raise ComposeError("a grad wrapper dropped Gradients.finite, which a guard needs; use dataclasses.replace")
        # Not donated: the old values are still needed for the case that the new ones are refused.
        new: TrainState = tree.where(finite, update(state, gradients, hyper, donate=False), state)
        counted = {name: account(state.slots[name], finite) for name, account in guards.items()}
        return replace(new, slots={**new.slots, **counted})

    return guarding
