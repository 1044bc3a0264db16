"""Adam, with weight decay in the gradient or apart from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ftrain.masks import Mask, everything, matrices
from ftrain.optim.family import (
    COUNT,
    NONE,
    Number,
    Part,
    average,
    average_squares,
    descend_quotient,
    leafwise,
    require_ranges,
)
from ftrain.types import Optimizer, Schedule


def adam(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""Adam (Kingma and Ba 2015, arXiv:1412.6980), with coupled (L2) weight decay as in `torch.optim.Adam`.

    With :math:`t` counting from 1:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    The state is that of `adamw`, which is the better choice with weight decay.

    Args:
        lr: learning rate :math:`\eta`, a number or a schedule.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`.
        amsgrad: divide by the largest :math:`v` so far (Reddi et al. 2018, arXiv:1904.09237).
        maximize: go up the gradient.
        decay_mask: ``(name, leaf) -> bool``, which parameters decay; all, unless told.

    Raises:
        OptionError: for a constant out of its range.
    """
    return _adam("adam", lr, (b1, b2), eps, weight_decay, amsgrad, maximize, decay_mask, decoupled=False)


def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decay_mask: Mask = matrices,
) -> Optimizer:
    r"""Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    With :math:`t` counting from 1:

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \eta \lambda p
            - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    The state is `count` (0-d float32, as torch's kernels want it), `mu` and `nu` (like the parameters), and with
    `amsgrad` also `nu_max`. Steps that a wrapper skips do not count.

    Args:
        lr: learning rate :math:`\eta`, a number or a schedule.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`.
        amsgrad: divide by the largest :math:`v` so far (Reddi et al. 2018, arXiv:1904.09237).
        maximize: go up the gradient.
        decay_mask: ``(name, leaf) -> bool``, which parameters decay; those with two axes or more,
            unless told.

    Raises:
        OptionError: for a constant out of its range.
    """
    return _adam("adamw", lr, (b1, b2), eps, weight_decay, amsgrad, maximize, decay_mask, decoupled=True)


def _adam(
    name: str,
    lr: float | Schedule,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    decay_mask: Mask,
    *,
    decoupled: bool,
) -> Optimizer:
    b1, b2 = betas
    require_ranges(name, 1.0, b1=b1, b2=b2, eps=eps)
    require_ranges(name, weight_decay=weight_decay)

    def constants(rate: Number, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        # In float64 as on the host, so that only the leaves' own dtype rounds.
        count = shared[COUNT].double()
        return rate / (1 - b1**count), (1 - b2**count).sqrt(), 1 - rate * weight_decay

    def rule(part: Part, size: Number, root: Number, kept: Number) -> None:
        p, mu, nu = part.leaf, part.state["mu"], part.state["nu"]
        g = part.descent(maximize=maximize, l2=0.0 if decoupled else weight_decay)
        average(mu, g, b1)
        average_squares(nu, g, b2)
        largest = part.state["nu_max"].clamp_min_(nu) if amsgrad else nu
        if decoupled and weight_decay and part.decay:
            p.mul_(kept)
        descend_quotient(p, mu, largest.sqrt().div_(root).add_(eps), size)

    def fused(part: Part, rate: float, shared: Mapping[str, Tensor]) -> None:
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        leaves = part.leaf
        kernel(
            leaves,
            part.grad,
            part.state["mu"],
            part.state["nu"],
            part.state["nu_max"] if amsgrad else [],
            [shared[COUNT]] * len(leaves),
            lr=rate,
            beta1=b1,
            beta2=b2,
            weight_decay=weight_decay if part.decay else 0.0,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
        )

    return leafwise(
        name,
        lr,
        rule,
        state=dict.fromkeys(["mu", "nu", *["nu_max"] * amsgrad], torch.zeros_like),
        shared={COUNT: NONE},
        constants=constants,
        fused=fused,
        decay_mask=decay_mask,
        options={"amsgrad": amsgrad, "maximize": maximize, "weight_decay": weight_decay},
    )
