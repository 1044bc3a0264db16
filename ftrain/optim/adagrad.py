"""Adagrad: the gradient divided by the root of the sum of all squared gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ftrain.optim.column import Part
from ftrain.optim.formula import Formula, Number, descend_quotient, require_ranges
from ftrain.optim.leafwise import leafwise
from ftrain.tree.name_patterns import Mask, everything
from ftrain.types import Optimizer, Schedule


def adagrad(
    lr: float | Schedule,
    *,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""Adagrad (Duchi, Hazan and Singer 2011, JMLR 12), as `torch.optim.Adagrad`.

    .. math::
        g &\leftarrow g + \lambda p \\
        s &\leftarrow s + g^2 \\
        p &\leftarrow p - \frac{\eta}{1 + (t - 1) \gamma} \frac{g}{\sqrt{s} + \epsilon}

    The state is `count` (0-d float32) and `sum`, :math:`s`, of the shapes and dtypes of the parameters.

    Besides the arguments that `ftrain.optim` describes:

    * `lr_decay`: :math:`\gamma`, at least 0.
    * `initial_accumulator_value`: the first value of :math:`s`, at least 0.
    """
    (eps,) = require_ranges("adagrad", 1.0, eps=eps)
    lr_decay, initial_accumulator_value = require_ranges(
        "adagrad", lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value
    )

    def constants(rate: Number, count: Tensor, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        return (rate / (1 + (count - 1) * lr_decay) if lr_decay else rate,)

    def rule(part: Part, rate: Number) -> None:
        g = part.descent(maximize=maximize)
        descend_quotient(part.leaf, g, part.state["sum"].addcmul_(g, g).sqrt().add_(eps), rate)

    def fused(part: Part, counts: list[Tensor], **common: Any) -> None:
        columns = part.leaf, part.grad, part.state["sum"], counts
        torch._fused_adagrad_(*columns, lr_decay=lr_decay, eps=eps, maximize=maximize, **common)

    formula = Formula(
        rule,
        state={"sum": lambda leaf: torch.full_like(leaf, initial_accumulator_value)},
        constants=constants,
        fused=fused,
        by_element=True,
    )
    return leafwise(
        "adagrad",
        lr,
        formula,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        shown={"lr_decay": lr_decay, "maximize": maximize},
        options={"initial_accumulator_value": initial_accumulator_value, "eps": eps},
    )
