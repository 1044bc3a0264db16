"""Adam with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import require_switches
from ftrain.optim.column import Part
from ftrain.optim.formula import Formula, Number, debias, descend_quotient, power, require_ranges, zeros
from ftrain.optim.leafwise import leafwise
from ftrain.tree.name_patterns import Mask, everything
from ftrain.types import Optimizer, Schedule


def nadam(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""NAdam (Dozat 2016, Incorporating Nesterov Momentum into Adam), as `torch.optim.NAdam`.

    With :math:`\mu_t = \beta_1 (1 - 0.96^{t \psi} / 2)`:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= \frac{\mu_{t+1} m}{1 - \prod_{i=1}^{t+1} \mu_i} + \frac{(1 - \mu_t) g}{1 - \prod_{i=1}^t \mu_i} \\
        p &\leftarrow p - \eta \frac{u}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    The state is `count` and `product` (0-d float32, the product of all :math:`\mu_i`), `mu` and `nu` (shapes and dtypes
    of the parameters).

    Besides the arguments that `ftrain.optim` describes:

    * `momentum_decay`: :math:`\psi`, at least 0.
    * `decoupled_weight_decay`: subtract :math:`\eta \lambda p` from the parameters instead, as AdamW does.
    """
    b1, b2, eps = require_ranges("nadam", 1.0, b1=b1, b2=b2, eps=eps)
    require_switches("nadam", decoupled_weight_decay=decoupled_weight_decay)
    (momentum_decay,) = require_ranges("nadam", momentum_decay=momentum_decay)

    def constants(rate: Number, count: Tensor, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        momentum = b1 * (1 - 0.5 * power(0.96, count * momentum_decay))
        next_momentum = b1 * (1 - 0.5 * power(0.96, (count + 1) * momentum_decay))
        product = shared["product"].mul_(momentum.float()).to(count.dtype)
        # Divide both terms of u by the factor of the gradient, and multiply the rate by it: one tensor less to scale.
        grad_factor = (1 - momentum) / (1 - product)
        mu_factor = next_momentum / (1 - product * next_momentum) / grad_factor
        # The correction of the second moment goes to the rate too, so that the denominator is sqrt(nu) + constant.
        nu_correction = debias(b2, count).sqrt()
        return rate * grad_factor * nu_correction, mu_factor, eps * nu_correction

    def rule(part: Part, step_size: Number, mu_factor: Number, scaled_eps: Number) -> None:
        g = part.descent(maximize=maximize, l2=not decoupled_weight_decay)
        mu = part.state["mu"].lerp_(g, 1 - b1)
        nu = part.state["nu"].mul_(b2).addcmul_(g, g, value=1 - b2)
        u = mu.mul(mu_factor).add_(g) if isinstance(mu_factor, Tensor) else g.add(mu, alpha=mu_factor)
        # Free the decayed gradient before the denominator is allocated.
        del g
        descend_quotient(part.leaf, u, nu.sqrt().add_(scaled_eps), step_size)

    formula = Formula(
        rule,
        state=zeros("mu", "nu"),
        shared={"product": torch.ones((), dtype=torch.float32, device=tree.HOST)},
        constants=constants,
        by_element=True,
        decoupled=decoupled_weight_decay,
    )
    options = {"b1": b1, "b2": b2, "eps": eps, "momentum_decay": momentum_decay}
    options["decoupled_weight_decay"] = decoupled_weight_decay
    return leafwise(
        "nadam",
        lr,
        formula,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        shown={"maximize": maximize},
        options=options,
    )
