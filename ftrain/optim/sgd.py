"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain import tree
from ftrain.checks import require_range
from ftrain.errors import OptionError
from ftrain.optim.leaves import DecayMask, Plan, Planner, everything, like, own, pick
from ftrain.schedules import as_schedule
from ftrain.types import Hyper, Optimizer, PyTree, Schedule


def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay_mask: DecayMask = everything,
) -> Optimizer:
    r"""Gradient descent, with momentum and coupled (L2) weight decay as in `torch.optim.SGD`.

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \mu m + g \\
        p &\leftarrow p - \eta\,(g + \mu m \text{ if nesterov else } m)

    Args:
        lr: learning rate :math:`\eta`, a number or a schedule.
        momentum: :math:`\mu` in [0, 1); 0 keeps no state.
        nesterov: look ahead along the momentum (Sutskever et al. 2013); needs momentum.
        weight_decay: :math:`\lambda`.
        decay_mask: ``(name, leaf) -> bool``, which parameters decay; all, unless told.

    Raises:
        OptionError: for a constant out of its range, or Nesterov without momentum.
    """
    require_range("sgd", "momentum", momentum, 0.0, 1.0)
    require_range("sgd", "weight_decay", weight_decay, 0.0)
    if nesterov and not momentum:
        raise OptionError("sgd: nesterov=True needs momentum > 0, found momentum=0.0")
    if isinstance(lr, int | float) and lr < 0:
        require_range("sgd", "lr", lr, 0.0)
    schedule = as_schedule(lr)
    # Not in 16 bits: torch's kernel for the CPU is wrong there (2.13).
    planner = Planner(decay_mask, half=False)

    def init(params: PyTree) -> PyTree:
        return {"momentum": tree.map(torch.zeros_like, params)} if momentum else {}

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        (leaves, gradients, *rest), spec = planner.columns(params, grads, *opt_state.values())
        plan = planner.of(spec, leaves, gradients, *rest)
        moments = rest[0] if momentum else []
        if isinstance(hyper["lr"], Tensor) or not plan.fusible:
            leaves, moments = plain(gradients, moments, leaves, plan.decays, hyper["lr"])
        else:
            leaves, moments = own(leaves, donate), own(moments, donate)
            fused(gradients, moments, leaves, plan, hyper["lr"])
        params, _, *state = tree.unflatten(spec, [*leaves, *gradients, *moments])
        return params, {"momentum": state[0]} if momentum else {}

    def plain(
        grads: list[Tensor],
        moments: list[Tensor],
        leaves: list[Tensor],
        decays: list[bool],
        rate: Tensor | float,
    ) -> tuple[list[Tensor], list[Tensor]]:
        new_leaves, new_moments = [], []
        for index, (grad, leaf, decay) in enumerate(zip(grads, leaves, decays, strict=True)):
            step = grad + weight_decay * leaf if decay and weight_decay else grad
            if momentum:
                moment = momentum * moments[index] + step
                new_moments.append(moment)
                step = step + momentum * moment if nesterov else moment
            factor = rate.to(leaf.dtype) if isinstance(rate, Tensor) else rate
            new_leaves.append(leaf - factor * step)
        return new_leaves, new_moments

    def fused(
        grads: list[Tensor],
        moments: list[Tensor],
        leaves: list[Tensor],
        plan: Plan,
        rate: float,
    ) -> None:
        grads = grads if plan.aligned else like(grads, leaves)
        for indices, decay in plan.groups:
            torch._fused_sgd_(
                pick(indices, leaves),
                pick(indices, grads),
                pick(indices, moments) if momentum else [],
                weight_decay=weight_decay if decay else 0.0,
                momentum=momentum,
                lr=rate,
                dampening=0.0,
                nesterov=nesterov,
                maximize=False,
                is_first_step=False,
            )

    options = [f"momentum={momentum:g}"] * bool(momentum) + ["nesterov"] * nesterov
    options += [f"weight_decay={weight_decay:g}"] * bool(weight_decay)
    return Optimizer(init, update, {"lr": schedule}, f"sgd({', '.join([repr(schedule), *options])})")
