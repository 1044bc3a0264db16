"""RMSprop: the gradient divided by the root of the average of its squares."""

from __future__ import annotations

from ftrain.optim.column import Part
from ftrain.optim.formula import Formula, Number, descend, descend_quotient, require_ranges, zeros
from ftrain.optim.leafwise import leafwise
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
    r"""RMSprop (Tieleman and Hinton 2012, lecture 6.5), as `torch.optim.RMSprop`.

    .. math::
        g &\leftarrow g + \lambda p \\
        v &\leftarrow \alpha v + (1 - \alpha) g^2 \\
        a &\leftarrow \alpha a + (1 - \alpha) g \quad\text{if centered, else } 0 \\
        b &\leftarrow \mu b + \frac{g}{\sqrt{v - a^2} + \epsilon} \\
        p &\leftarrow p - \eta b

    The state is `nu`, :math:`v`; if centered (Graves 2013, arXiv:1308.0850) also `mu`, :math:`a`; with momentum also
    `momentum`, :math:`b`; all of the shapes and dtypes of the parameters.

    Besides the arguments that `ftrain.optim` describes:

    * `alpha`: :math:`\alpha`, decay rate of the moments, in [0, 1).
    * `momentum`: :math:`\mu` in [0, 1).
    * `centered`: divide by the standard deviation of the gradient.
    """
    alpha, eps, momentum = require_ranges("rmsprop", 1.0, alpha=alpha, eps=eps, momentum=momentum)

    def rule(part: Part, rate: Number) -> None:
        g = part.descent(maximize=maximize)
        nu = part.state["nu"].mul_(alpha).addcmul_(g, g, value=1 - alpha)
        if centered:
            mu = part.state["mu"].lerp_(g, 1 - alpha)
            denominator = nu.addcmul(mu, mu, value=-1).sqrt_().add_(eps)
        else:
            denominator = nu.sqrt().add_(eps)
        if momentum:
            descend(part.leaf, part.state["momentum"].mul_(momentum).addcdiv_(g, denominator), rate)
        else:
            descend_quotient(part.leaf, g, denominator, rate)

    moments = ["nu", *(["mu"] if centered else []), *(["momentum"] if momentum else [])]
    formula = Formula(rule, state=zeros(*moments), by_element=True)
    return leafwise(
        "rmsprop",
        lr,
        formula,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        shown={"momentum": momentum, "centered": centered, "maximize": maximize},
        options={"alpha": alpha, "eps": eps},
    )
