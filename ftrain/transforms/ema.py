"""Exponential moving average of the parameters, for evaluation."""

from __future__ import annotations

import torch

from ftrain import tree
from ftrain.errors import require_range
from ftrain.step.wrapper import OnUpdate, SlotSpec, Wrapper, wrapper
from ftrain.types import Gradients, Hyper, PyTree, TrainState, UpdateFn, replace

NAME = "ema"


@wrapper
def ema(decay: float = 0.999) -> Wrapper:
    r"""Keep an average of the parameters (Polyak and Juditsky 1992), started at their initial values.

    .. math:: a \leftarrow d\,a + (1 - d)\,p

    after every update. `averaged` returns the state with the average in place of the parameters.

    Args:
        decay: :math:`d` in [0, 1).

    Raises:
        OptionError: for a decay out of its range.
    """
    require_range("ema", "decay", decay, 0.0, 1.0)

    def wrap(update: UpdateFn) -> UpdateFn:
        def averaging(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            averages, spec = tree.flatten(state.slots[NAME])
            new = update(state, gradients, hyper, donate=donate)
            params = [leaf.to(average.dtype) for leaf, average in zip(tree.leaves(new.params), averages, strict=True)]
            if donate:
                torch._foreach_lerp_(averages, params, 1 - decay)
            else:
                averages = list(torch._foreach_lerp(averages, params, 1 - decay))
            return replace(new, slots={**new.slots, NAME: tree.unflatten(spec, averages)})

        return averaging

    return Wrapper(
        NAME, f"ema({decay:g})", update=OnUpdate(wrap, reads_gradients=False), slot=SlotSpec(_initial_average)
    )


def _initial_average(params: PyTree) -> PyTree:
    # In 16 bits the small steps of an average would round to nothing.
    return tree.map(lambda leaf: leaf.detach().to(torch.promote_types(leaf.dtype, torch.float32), copy=True), params)
