"""Stochastic weight averaging: the plain mean of the parameters at many steps, for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import OptionError, require_positive
from ftrain.step.wrapper import OnUpdate, SlotSpec, Wrapper, wrapper
from ftrain.types import Gradients, Hyper, PyTree, TrainState, UpdateFn, replace

NAME = "swa"


@wrapper
def swa(start: int = 0, every: int = 1) -> Wrapper:
    r"""Average the parameters with equal weights (Izmailov et al. 2018, arXiv:1803.05407).

    .. math:: a \leftarrow a + (p - a) / n

    after update `start` + `every` and then after each `every`-th update, where :math:`n` counts these averages; before
    the first, :math:`a` equals the parameters. `averaged` returns the state with the average in place of the
    parameters; its BatchNorm statistics are those of the trained parameters. Updates that a wrapper skips do not count.

    Args:
        start: number of updates before the averaging begins.
        every: number of updates from one average to the next.

    Raises:
        OptionError: for numbers out of their range.
    """
    require_positive(NAME, "every", every)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise OptionError(f"swa: start is {start!r}, needs a whole number of at least 0")

    def wrap(update: UpdateFn) -> UpdateFn:
        def averaging(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            slot = state.slots[NAME]
            averages, spec = tree.flatten(slot["params"])
            new = update(state, gradients, hyper, donate=donate)
            updates = slot["updates"] + 1
            widest = max((leaf.dtype for leaf in averages), key=lambda dtype: dtype.itemsize)
            weight = _weight(updates, start, every, widest)
            averages = [
                torch.lerp(average, leaf.to(average.dtype), weight.to(average.device, average.dtype))
                for average, leaf in zip(averages, tree.leaves(new.params), strict=True)
            ]
            return replace(
                new, slots={**new.slots, NAME: {"params": tree.unflatten(spec, averages), "updates": updates}}
            )

        return averaging

    return Wrapper(
        NAME, f"swa({start}, {every})", update=OnUpdate(wrap, reads_gradients=False), slot=SlotSpec(_initial_slot)
    )


def _weight(updates: Tensor, start: int, every: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of the parameters in the average: 1 at first, 1 / n where they enter it, and else 0."""
    since_start = updates - start
    n = torch.div(since_start, every, rounding_mode="floor")
    share = torch.where(since_start % every == 0, 1.0 / n.clamp(min=1).to(dtype), 0.0)
    return torch.where(n < 1, 1.0, share)


def _initial_slot(params: PyTree) -> PyTree:
    # In 16 bits the small steps of an average would round to nothing.
    wide = tree.map(lambda leaf: leaf.detach().to(torch.promote_types(leaf.dtype, torch.float32), copy=True), params)
    return {"params": wide, "updates": torch.zeros((), dtype=torch.int64, device=tree.device_of(params))}
