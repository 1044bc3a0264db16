"""RMSprop: the gradient divided by its own running size."""

from __future__ import annotations

import torch

from ftrain.optim.elementwise import (
    Number,
    Part,
    average,
    average_squares,
    descend,
    descend_quotient,
    leafwise,
    require_ranges,
)
from ftrain.tree.name_patterns import Mask, everything
from ftrain.types import Optimizer, Schedule


def rmsprop(
    lr: float | Schedule,
    *,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""RMSprop (Tieleman and Hinton 2012, lecture 6.5 of Neural Networks for Machine Learning), as torch has it.

    .. math::
        g &\leftarrow g + \lambda p \\
        v &\leftarrow \alpha v + (1 - \alpha) g^2 \\
        a &\leftarrow \alpha a + (1 - \alpha) g \quad\text{if centered, else } 0 \\
        b &\leftarrow \mu b + \frac{g}{\sqrt{v - a^2} + \epsilon} \\
        p &\leftarrow p - \eta b

    The state is `nu`, when centered (Graves 2013, arXiv:1308.0850) also `mu`, and with momentum `momentum`.

    Args:
        lr: learning rate :math:`\eta`, a number or a schedule.
        alpha: decay of the moments, in [0, 1).
        eps: added to the root.
        weight_decay: :math:`\lambda`.
        momentum: :math:`\mu` in [0, 1); 0 keeps no state of it.
        centered: divide by the standard deviation instead of the size.
        maximize: go up the gradient.
        decay_mask: ``(name, leaf) -> bool``, which parameters decay; all, unless told.

    Raises:
        OptionError: for a constant out of its range.
    """
    require_ranges("rmsprop", 1.0, alpha=alpha, eps=eps, momentum=momentum)
    require_ranges("rmsprop", weight_decay=weight_decay)

    def rule(part: Part, rate: Number) -> None:
        g = part.descent(maximize=maximize, l2=weight_decay)
        spread = average_squares(part.state["nu"], g, alpha)
        if centered:
            mu = average(part.state["mu"], g, alpha)
            root = spread.addcmul(mu, mu, value=-1).sqrt_().add_(eps)
        else:
            root = spread.sqrt().add_(eps)
        if momentum:
            descend(part.leaf, part.state["momentum"].mul_(momentum).addcdiv_(g, root), rate)
        else:
            descend_quotient(part.leaf, g, root, rate)

    names = ["nu", *["mu"] * centered, *["momentum"] * bool(momentum)]
    return leafwise(
        "rmsprop",
        lr,
        rule,
        state=dict.fromkeys(names, torch.zeros_like),
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        options={"momentum": momentum, "centered": centered, "maximize": maximize},
    )
