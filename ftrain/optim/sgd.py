"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ftrain.errors import OptionError, require_range, require_switches
from ftrain.optim.column import Part
from ftrain.optim.formula import Formula, Number, descend, require_ranges, zeros
from ftrain.optim.leafwise import leafwise
from ftrain.optim.state_dtype import low_precision
from ftrain.tree.name_patterns import Mask, everything
from ftrain.types import Optimizer, Schedule


def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
    state_dtype: Literal["bf16", "fp32"] | None = None,
    stochastic_rounding: bool | None = None,
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""Gradient descent, with momentum and coupled (L2) weight decay as in `torch.optim.SGD`.

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \mu m + (1 - \tau) g \\
        p &\leftarrow p - \eta\,(g + \mu m \text{ if nesterov else } m)

    The first gradient is not dampened. The state is `momentum`, :math:`m` (shapes of the parameters, their dtypes or
    `state_dtype`), with dampening also `count` (0-d float32), and empty without momentum.

    Besides the arguments that `ftrain.optim` describes:

    * `momentum`: :math:`\mu` in [0, 1).
    * `dampening`: :math:`\tau` in [0, 1].
    * `nesterov`: Nesterov momentum (Sutskever et al. 2013); needs momentum without dampening.

    Raises:
        OptionError: an argument is out of its range, or Nesterov without momentum or with dampening.
    """
    (momentum,) = require_ranges("sgd", 1.0, momentum=momentum)
    dampening = require_range("sgd", "dampening", dampening, 0.0, 1.0, closed=True)
    require_switches("sgd", nesterov=nesterov)
    if nesterov and (dampening or not momentum):
        raise OptionError(
            f"sgd: nesterov is True, needs momentum > 0 and dampening 0; found {momentum} and {dampening}"
        )
    damped = bool(momentum and dampening)

    def constants(rate: Number, count: Tensor, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        return rate, 1 - dampening * (count > 1).to(count.dtype)

    def rule(part: Part, rate: Number, grad_factor: Number = 1.0) -> None:
        g = part.descent(maximize=maximize)
        if momentum:
            m = part.state["momentum"].mul_(momentum).add_(g.mul(grad_factor) if damped else g)
            g = g.add(m, alpha=momentum) if nesterov else m
        descend(part.leaf, g, rate)

    shown: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "maximize": maximize}

    def fused(part: Part, counts: list[Tensor], **common: Any) -> None:
        torch._fused_sgd_(part.leaf, part.grad, part.state.get("momentum", []), is_first_step=False, **shown, **common)

    formula = Formula(
        rule,
        state=zeros("momentum") if momentum else {},
        constants=constants if damped else None,
        # The fused kernel takes `is_first_step` from the host, which would have to read `count`.
        fused=None if damped else fused,
        # torch's fused kernel for the CPU is wrong for 16-bit parameters (torch 2.13).
        fused_in_16_bits=False,
        by_element=True,
    )
    return leafwise(
        "sgd",
        lr,
        formula,
        storage=low_precision("sgd", state_dtype, stochastic_rounding, ["momentum"] if momentum else []),
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        shown=shown,
    )
