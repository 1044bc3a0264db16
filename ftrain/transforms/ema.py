"""Exponential moving average of the parameters, for evaluation."""

from __future__ import annotations

import dataclasses

import torch

from ftrain import tree
from ftrain.errors import OptionError, StructureError
from ftrain.types import Gradients, Hyper, TrainState, UpdateFn
from ftrain.wrapper import Wrapper, wrapper

NAME = "ema"


@wrapper
def ema(decay: float = 0.999) -> Wrapper:
    r"""Keep an average of the parameters (Polyak and Juditsky 1992), started at their initial values.

    .. math:: a \leftarrow d\,a + (1 - d)\,p

    after every update. `averaged` gives the state with the average in the parameters' place.

    Args:
        decay: :math:`d` in [0, 1).

    Raises:
        OptionError: for a decay out of its range.
    """
    if not 0 <= decay < 1:
        raise OptionError(f"ema: decay is {decay!r}, needs a number in [0, 1)")

    def wrap(update: UpdateFn) -> UpdateFn:
        def averaging(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            averages, spec = tree.flatten(state.slots[NAME])
            new = update(state, gradients, hyper, donate=donate)
            params = tree.leaves(new.params)
            if donate:
                torch._foreach_lerp_(averages, params, 1 - decay)
            else:
                averages = list(torch._foreach_lerp(averages, params, 1 - decay))
            return dataclasses.replace(new, slots={**new.slots, NAME: tree.unflatten(spec, averages)})

        return averaging

    return Wrapper(NAME, f"ema({decay:g})", "update", update=wrap, slot=tree.clone)


def averaged(state: TrainState) -> TrainState:
    """Return the state with the averaged parameters in place of the trained ones, to evaluate or save.

    Raises:
        StructureError: when the state was made by a step without `ema`.
    """
    if NAME not in state.slots:
        raise StructureError("averaged: the state holds no averages; compose the step with ft.ema(decay)")
    return dataclasses.replace(state, params=state.slots[NAME])
