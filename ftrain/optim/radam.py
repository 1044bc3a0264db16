"""Rectified Adam: smaller steps while the second moment is estimated from few gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ftrain.errors import require_switches
from ftrain.optim.column import Part
from ftrain.optim.formula import Formula, Number, debias, descend, descend_quotient, power, require_ranges, zeros
from ftrain.optim.leafwise import leafwise
from ftrain.tree.name_patterns import Mask, everything
from ftrain.types import Optimizer, Schedule


def radam(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""Rectified Adam (Liu et al. 2020, arXiv:1908.03265), as `torch.optim.RAdam`.

    With :math:`\rho_\infty = 2 / (1 - \beta_2) - 1` and
    :math:`\rho_t = \rho_\infty - 2 t \beta_2^t / (1 - \beta_2^t)`:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        r &= \sqrt{\frac{(\rho_t - 4)(\rho_t - 2) \rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2) \rho_t}} \\
        p &\leftarrow p - \eta \frac{m}{1 - \beta_1^t}
            \left(r \frac{\sqrt{1 - \beta_2^t}}{\sqrt{v} + \epsilon} \text{ if } \rho_t > 5 \text{ else } 1\right)

    The state is `count` (0-d float32), `mu` and `nu` (shapes and dtypes of the parameters).

    Besides the arguments that `ftrain.optim` describes:

    * `decoupled_weight_decay`: subtract :math:`\eta \lambda p` from the parameters instead, as AdamW does.
    """
    b1, b2, eps = require_ranges("radam", 1.0, b1=b1, b2=b2, eps=eps)
    require_switches("radam", decoupled_weight_decay=decoupled_weight_decay)
    rho_limit = 2 / (1 - b2) - 1

    def constants(rate: Number, count: Tensor, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        mu_correction, nu_correction = debias(b1, count), debias(b2, count)
        rho = rho_limit - 2 * count * power(b2, count) / nu_correction
        rectifier = (rho - 4) * (rho - 2) * rho_limit / ((rho_limit - 4) * (rho_limit - 2) * rho)
        root_factor = mu_correction / (rectifier * nu_correction).sqrt()
        # torch.where and not a product: the square root is NaN if the rectifier is negative.
        is_rectified = rho > 5
        return (
            rate,
            torch.where(is_rectified, root_factor, 0.0),
            torch.where(is_rectified, eps * root_factor, mu_correction),
        )

    def rule(part: Part, rate: Number, root_factor: Number, summand: Number) -> None:
        # The denominator is root_factor * sqrt(nu) + summand; the factor is 0 in steps that are not rectified.
        g = part.descent(maximize=maximize, l2=not decoupled_weight_decay)
        mu = part.state["mu"].lerp_(g, 1 - b1)
        nu = part.state["nu"].mul_(b2).addcmul_(g, g, value=1 - b2)
        # Free the decayed gradient before the denominator is allocated.
        del g
        if isinstance(root_factor, Tensor):
            descend_quotient(part.leaf, mu, nu.sqrt().mul_(root_factor).add_(summand), rate)
        elif root_factor:
            descend_quotient(part.leaf, mu, nu.sqrt().add_(summand / root_factor), rate / root_factor)
        else:
            descend(part.leaf, mu, rate / summand)

    formula = Formula(
        rule, state=zeros("mu", "nu"), constants=constants, by_element=True, decoupled=decoupled_weight_decay
    )
    return leafwise(
        "radam",
        lr,
        formula,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        shown={"maximize": maximize},
        options={"b1": b1, "b2": b2, "eps": eps, "decoupled_weight_decay": decoupled_weight_decay},
    )
