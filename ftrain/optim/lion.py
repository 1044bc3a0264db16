"""Lion: the sign of an average of the gradients, times the learning rate."""

from __future__ import annotations

from typing import Literal

from ftrain.optim.column import Part
from ftrain.optim.formula import Formula, Number, descend, require_ranges, zeros
from ftrain.optim.leafwise import leafwise
from ftrain.optim.state_dtype import low_precision
from ftrain.tree.name_patterns import Mask, matrices
from ftrain.types import Optimizer, Schedule


def lion(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float | Schedule = 0.0,
    state_dtype: Literal["bf16", "fp32"] | None = None,
    stochastic_rounding: bool | None = None,
    decay_mask: Mask = matrices,
) -> Optimizer:
    r"""Lion (Chen et al. 2023, arXiv:2302.06675).

    .. math::
        c &= \beta_1 m + (1 - \beta_1) g \\
        p &\leftarrow p - \eta \lambda p - \eta \operatorname{sign}(c) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g

    The state is `mu`, :math:`m` (shapes of the parameters, their dtypes or `state_dtype`). The paper uses learning
    rates 3 to 10 times smaller than AdamW's, and weight decays 3 to 10 times larger.

    Besides the arguments that `ftrain.optim` describes:

    * `b1`: :math:`\beta_1`, weight of the momentum in the step, in [0, 1).
    * `b2`: :math:`\beta_2`, decay rate of the momentum, in [0, 1).
    """
    b1, b2 = require_ranges("lion", 1.0, b1=b1, b2=b2)

    def rule(part: Part, rate: Number) -> None:
        g, mu = part.grad, part.state["mu"]
        descend(part.leaf, mu.mul(b1).add_(g, alpha=1 - b1).sign_(), rate)
        mu.lerp_(g, 1 - b2)
        # The sign of NaN is 0 in torch, which would stop the parameter for good without a word; so it becomes NaN too.
        part.leaf.add_(mu, alpha=0.0)

    formula = Formula(rule, state=zeros("mu"), by_element=True, decoupled=True)
    return leafwise(
        "lion",
        lr,
        formula,
        storage=low_precision("lion", state_dtype, stochastic_rounding, ["mu"]),
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        options={"b1": b1, "b2": b2},
    )
