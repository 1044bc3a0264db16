"""The scale of the loss under fp16: halved when gradients overflow, doubled after many steps in which none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftrain import tree
from ftrain.step.loss_forms import report
from ftrain.types import PyTree, TrainState, replace

NAME = "with_amp"
"""The name of the wrapper and of its slot."""

INITIAL_SCALE = 2.0**16
GROWTH = 2.0
GROWTH_INTERVAL = 2000
"""The constants of `torch.amp.GradScaler`."""

LEAST_SCALE = 2.0**-24
"""The smallest number of float16: a scale of 0 would make all later gradients NaN."""


def reporting_scale(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that reports the scale of its loss as the metric ``loss_scale``."""

    def reporting(state: TrainState, *args: Any) -> Any:
        result = run(state, *args)
        # A copy: the slot may be donated.
        return replace(result, metrics=report(result.metrics, NAME, loss_scale=scale_of(state).clone()))

    return reporting


def initial_slot(params: PyTree) -> PyTree:
    """Return the slot before the first step: the scale, and ``good``, the number of steps since the scale changed."""
    device = tree.device_of(params)
    return {
        "scale": torch.full((), INITIAL_SCALE, dtype=torch.float32, device=device),
        "good": torch.zeros((), dtype=torch.int64, device=device),
    }


def scale_of(state: TrainState) -> Tensor:
    """Return the scale of the loss, a 0-d float32 tensor on the device of the parameters."""
    return state.slots[NAME]["scale"]  # type: ignore[no-any-return]


def next_slot(slot: PyTree, finite: Tensor) -> PyTree:
    """Return the slot after a step, by the rule of `torch.amp.GradScaler.update`."""
    good = slot["good"] + 1
    larger = slot["scale"] * GROWTH
    grow = good >= GROWTH_INTERVAL
    grown = torch.where(grow & torch.isfinite(larger), larger, slot["scale"])
    return {
        "scale": torch.where(finite, grown, (slot["scale"] / GROWTH).clamp_min(LEAST_SCALE)),
        "good": torch.where(finite & ~grow, good, 0),
    }
