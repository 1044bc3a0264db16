"""Skip or clip steps whose gradient norm is far above recent norms."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import ComposeError, require_choice, require_positive, require_positive_number, require_range
from ftrain.step.loss_forms import report
from ftrain.step.wrapper import OnGrad, SlotSpec, Wrapper, wrapper
from ftrain.types import GradFn, Gradients, PyTree, TrainState, replace

NAME = "skip_spikes"
Action: TypeAlias = Literal["skip", "clip"]
ACTIONS: tuple[Action, ...] = ("skip", "clip")


@wrapper
def skip_spikes(
    factor: float = 3.0,
    *,
    quantile: float = 0.5,
    window: int = 128,
    warmup: int = 32,
    action: Action = "skip",
) -> Wrapper:
    """Skip steps whose gradient norm is far above the norms of recent steps, or clip their gradient.

    The limit is `factor` times a quantile of the last `window` finite norms. The norms of spikes are among them, so
    that a run whose gradients stay large continues. There is no limit while that quantile is 0.
    ``skip_spikes(1.0, quantile=0.1, action="clip")`` is AutoClip (Seetharaman et al. 2020, arXiv:2007.14469) over a
    window, which is the percentile clipping of bitsandbytes.

    The metric `spike` says in which steps it acted. A skipped step changes only the step count and
    ``state.slots["skip_spikes"]``, the norms and the number of spikes. Norms that are infinite or NaN are not stored,
    and their steps are not skipped: `skip_nonfinite` does that. The norm is that of the gradient that this wrapper
    gets: write it before `clip`. With ``"skip"``, donation saves no memory.

    Args:
        factor: what the quantile is multiplied by.
        quantile: in [0, 1]; 0.5 is the median. Between two norms the lower one is used.
        window: number of norms that are stored.
        warmup: number of finite norms that must have been stored before it acts.
        action: ``"skip"``, or ``"clip"`` to scale the gradient down to the limit.

    Raises:
        OptionError: for an argument out of its range.
        ComposeError: when it is written before `accumulate`: it cannot skip single microbatches.
    """
    require_positive_number(NAME, "factor", factor)
    require_range(NAME, "quantile", quantile, 0.0, 1.0, closed=True)
    require_positive(NAME, "window", window)
    require_positive(NAME, "warmup", warmup)
    require_choice(NAME, "action", action, ACTIONS)

    def wrap(grad: GradFn) -> GradFn:
        def checking(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            gradients = grad(state, batch, rng)
            leaves, spec = tree.flatten(gradients.grads)
            norm = tree.norm_of(leaves)
            slot = state.slots[NAME]
            limit = factor * _quantile(slot["norms"], slot["count"], quantile)
            spike = (slot["count"] >= warmup) & torch.isfinite(norm) & (norm > limit) & (limit > 0)
            # To clip, only the list refers to the gradients, so that each is freed when it has been scaled.
            gradients = replace(
                gradients,
                grads=None if action == "clip" else gradients.grads,
                slots={**gradients.slots, NAME: _next_slot(slot, norm, spike)},
                metrics=report(gradients.metrics, NAME, spike=spike),
            )
            if action == "clip":
                tree.scale_in_turn(leaves, torch.where(spike, limit / norm, 1.0))
                return replace(gradients, grads=tree.unflatten(spec, leaves))
            accept = ~spike if gradients.accept is None else gradients.accept & ~spike
            return replace(gradients, accept=accept)

        return checking

    text = f"skip_spikes({factor:g}, quantile={quantile:g}, window={window}, {action})"
    on_grad = OnGrad(wrap, may_refuse_updates=action == "skip", reads_norm=True, by_element=True)
    slot = SlotSpec(partial(_initial_slot, window))
    return Wrapper(NAME, text, grad=on_grad, slot=slot, validate=_require_whole_batches)


def _require_whole_batches(step: Any) -> None:
    names = [wrapper.name for wrapper in step.wrappers]
    for other in step.wrappers[names.index(NAME) + 1 :]:
        if other.grad and other.grad.microbatches is not None and other.grad.microbatches > 1:
            raise ComposeError(
                f"skip_spikes: {other.text} is written after skip_spikes, which cannot skip single microbatches; write "
                f"skip_spikes after {other.name}"
            )


def _initial_slot(window: int, params: PyTree) -> PyTree:
    device = tree.device_of(params)
    has_float64 = any(leaf.dtype == torch.float64 for leaf in tree.leaves(params))
    return {
        "norms": torch.zeros(window, dtype=torch.float64 if has_float64 else torch.float32, device=device),
        "count": torch.zeros((), dtype=torch.int64, device=device),
        "spikes": torch.zeros((), dtype=torch.int64, device=device),
    }


def _quantile(norms: Tensor, count: Tensor, quantile: float) -> Tensor:
    """Return a quantile of the stored norms, as a 0-d tensor; `count` norms have been stored so far."""
    stored = count.clamp(1, norms.numel())
    is_stored = torch.arange(norms.numel(), device=norms.device) < stored
    ascending = torch.where(is_stored, norms, float("inf")).sort().values
    rank = ((stored - 1) * quantile).floor().to(torch.int64)
    return ascending.gather(0, rank.view(1)).view(())


def _next_slot(slot: PyTree, norm: Tensor, spike: Tensor) -> PyTree:
    """Return the slot after a step; a norm that is not finite is not stored."""
    norms, count = slot["norms"], slot["count"]
    is_finite = torch.isfinite(norm)
    # A ring: the new norm takes the place of the oldest one.
    is_next = torch.arange(norms.numel(), device=norms.device) == count % norms.numel()
    return {
        "norms": torch.where(is_next & is_finite, norm.to(norms.dtype), norms),
        "count": count + is_finite,
        "spikes": slot["spikes"] + spike,
    }
