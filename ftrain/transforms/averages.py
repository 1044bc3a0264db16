"""Averages of the parameters for evaluation: the wrappers `ema` and `swa`, and `averaged`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import StructureError, require_positive, require_range, whole_number
from ftrain.optim.schedules.call import bounded, describe
from ftrain.optim.schedules.combine import schedule_of
from ftrain.step.state_checks import require_state
from ftrain.step.wrapper import OnUpdate, SlotSpec, Wrapper, wrapper
from ftrain.tree.derived import derived
from ftrain.types import Gradients, Hyper, Optimizer, PyTree, Schedule, TrainState, UpdateFn, replace

EMA, SWA = "ema", "swa"

EMA_DECAY = "ema_decay"
"""The scheduled value of `ema`: its name in the metrics of a step."""


@wrapper
def ema(decay: float | Schedule = 0.999) -> Wrapper:
    r"""Keep an exponential moving average of the parameters (Polyak and Juditsky 1992).

    .. math:: a \leftarrow d\,a + (1 - d)\,p

    with the decay :math:`d` after every update; it starts at the initial parameters. `averaged` returns the state with
    the average.

    Args:
        decay: a number in [0, 1), or a schedule with values in [0, 1] (Grill et al. 2020, arXiv:2006.07733, section 3);
            its value is then the metric ``ema_decay``. Pass a function of your own by name: ``ema(decay=function)``.

    Raises:
        OptionError: when `decay` is not in its range; for a schedule, from the step.
    """
    schedule = schedule_of(EMA, "decay", decay) if callable(decay) else None
    constant = 0.0 if schedule else require_range(EMA, "decay", decay, 0.0, 1.0)
    text = f"ema({describe(schedule) if schedule else format(constant, 'g')})"

    def wrap(update: UpdateFn) -> UpdateFn:
        def averaging(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            averages, spec = tree.flatten(state.slots[EMA])
            new = update(state, gradients, hyper, donate=donate)
            params = [leaf.to(average.dtype) for leaf, average in zip(tree.leaves(new.params), averages, strict=True)]
            averages = _lerped(averages, params, 1 - hyper.get(EMA_DECAY, constant), donate=donate)
            return replace(new, slots={**new.slots, EMA: tree.unflatten(spec, averages)})

        return averaging

    add_schedule = partial(_with_schedule, decay=schedule) if schedule else None
    on_update = dataclasses.replace(_on_update(wrap), optimizer=add_schedule)
    return Wrapper(EMA, text, update=on_update, slot=SlotSpec(_wide_copy))


def _with_schedule(optimizer: Optimizer, decay: Schedule) -> Optimizer:
    """Return the optimizer with the decay among the values that a step schedules: in a graph they are inputs."""
    return replace(optimizer, schedules={**optimizer.schedules, EMA_DECAY: bounded(EMA, EMA_DECAY, decay, 1.0)})


def _lerped(averages: list[Tensor], params: list[Tensor], weight: float | Tensor, *, donate: bool) -> list[Tensor]:
    """Return the averages moved towards the parameters by a weight, which is a 0-d tensor in a graph."""
    if isinstance(weight, Tensor):
        lerp = Tensor.lerp_ if donate else torch.lerp
        pairs = zip(averages, params, strict=True)
        return [lerp(average, leaf, weight.to(average.device, average.dtype)) for average, leaf in pairs]
    if donate:
        torch._foreach_lerp_(averages, params, weight)
        return averages
    return list(torch._foreach_lerp(averages, params, weight))


@wrapper
def swa(start: int = 0, every: int = 1) -> Wrapper:
    r"""Average the parameters of many steps with equal weights (Izmailov et al. 2018, arXiv:1803.05407).

    .. math:: a \leftarrow a + (p - a) / n

    after update `start` + `every` and then after each `every`-th update, where :math:`n` counts these averages. Before
    the first, :math:`a` equals the parameters. Updates that a wrapper skips do not count. `averaged` returns the state
    with the average; its BatchNorm statistics are those of the trained parameters.

    Args:
        start: number of updates before the averaging begins.
        every: number of updates from one average to the next.

    Raises:
        OptionError: when `start` or `every` is not in its range.
    """
    require_positive(SWA, "every", every)
    start = whole_number(SWA, "start", start)

    def wrap(update: UpdateFn) -> UpdateFn:
        def averaging(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            averages, spec = tree.flatten(state.slots[SWA]["params"])
            new = update(state, gradients, hyper, donate=donate)
            updates = state.slots[SWA]["updates"] + 1
            widest_dtype = max((leaf.dtype for leaf in averages), key=lambda dtype: dtype.itemsize)
            weight = _swa_weight(updates, start, every, widest_dtype)
            lerp = Tensor.lerp_ if donate else torch.lerp
            averages = [
                lerp(average, leaf.to(average.dtype), weight.to(average.device, average.dtype))
                for average, leaf in zip(averages, tree.leaves(new.params), strict=True)
            ]
            slot = {"params": tree.unflatten(spec, averages), "updates": updates}
            return replace(new, slots={**new.slots, SWA: slot})

        return averaging

    def init(params: PyTree) -> PyTree:
        updates = torch.zeros((), dtype=torch.int64, device=tree.device_of(params))
        return {"params": _wide_copy(params), "updates": updates}

    return Wrapper(SWA, f"swa({start}, {every})", update=_on_update(wrap), slot=SlotSpec(init))


def _on_update(wrap: Callable[[UpdateFn], UpdateFn]) -> OnUpdate:
    return OnUpdate(wrap, reads_gradients=False, by_element=True, reads_old_state=False)


def _swa_weight(updates: Tensor, start: int, every: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of the new parameters: 1 before the first average, 1 / n in an average, else 0."""
    since_start = updates - start
    n = torch.div(since_start, every, rounding_mode="floor")
    weight = torch.where(since_start % every == 0, 1.0 / n.clamp(min=1).to(dtype), 0.0)
    return torch.where(n < 1, 1.0, weight)


def _wide_copy(params: PyTree) -> PyTree:
    # In 16 bits the small changes of an average would be rounded to zero.
    return tree.map(lambda leaf: leaf.detach().to(torch.promote_types(leaf.dtype, torch.float32), copy=True), params)


def averaged(state: TrainState, kind: Literal["ema", "swa"] | None = None) -> TrainState:
    """Return the state with the averaged parameters in place of the trained ones, to evaluate or save.

    It shares memory with the state, and is consumed with it: keep a copy (`ftrain.tree.clone`) of the best average.

    Args:
        state: state of a step with `ema` or `swa`.
        kind: ``"ema"`` or ``"swa"``; needed only when the step has both.

    Raises:
        StructureError: when `state` is not a state; when it has no such average; when it has both and `kind` is None;
            or when its average is of other parameters than it trains.
    """
    require_state("averaged", state)
    kinds = [name for name in (EMA, SWA) if name in state.slots]
    if not kinds or (kind is not None and kind not in kinds):
        content = f"no average of {kind!r}, but one of {kinds[0]}" if kinds else "no averages"
        missing_wrapper = f"ft.{kind}" if kind in (EMA, SWA) else "ft.ema(decay) or ft.swa()"
        raise StructureError(f"averaged: the state holds {content}; compose the step with {missing_wrapper}")
    if kind is None and len(kinds) > 1:
        raise StructureError("averaged: the state holds two averages; choose one: averaged(state, 'ema')")
    name = kind or kinds[0]
    averages = state.slots[name]["params"] if name == SWA else state.slots[name]
    if tree.leaf_names(averages) != tree.leaf_names(state.params):
        raise StructureError(
            "averaged: the state has averages of other parameters than it trains; if its adapters were merged, average "
            "first: ft.adapters.merge(step, ft.averaged(state))"
        )
    return derived(state, params=tree.map(lambda average, leaf: average.to(leaf.dtype), averages, state.params))
