"""LAMB: the update of Adam, scaled to the norm of the parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ftrain.optim.column import Column, Part, Tensors
from ftrain.optim.formula import Formula, Number, debias, descend, require_ranges, zeros
from ftrain.optim.leafwise import leafwise
from ftrain.tree.name_patterns import Mask, matrices
from ftrain.types import Optimizer, Schedule


def lamb(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    decay_mask: Mask = matrices,
) -> Optimizer:
    r"""LAMB (You et al. 2020, arXiv:1904.00962), for large batches.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda p \\
        p &\leftarrow p - \eta \frac{\lVert p \rVert}{\lVert u \rVert} u

    with norms of each parameter; where one of them is zero, their ratio is taken as 1. The state is `count` (0-d
    float32), `mu` and `nu` (shapes and dtypes of the parameters).
    """
    b1, b2, eps = require_ranges("lamb", 1.0, b1=b1, b2=b2, eps=eps)

    def constants(rate: Number, count: Tensor, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        return rate, 1 / debias(b1, count), debias(b2, count).sqrt()

    def rule(part: Part, rate: Number, mu_scale: Number, nu_correction: Number) -> None:
        p, g = part.leaf, part.grad
        mu = part.state["mu"].lerp_(g, 1 - b1)
        nu = part.state["nu"].mul_(b2).addcmul_(g, g, value=1 - b2)
        u = mu.mul(mu_scale).div_(nu.sqrt().div_(nu_correction).add_(eps))
        if part.weight_decay:
            u.add_(p, alpha=part.weight_decay)
        descend(p, u.mul_(_trust_ratio(p, u)), rate)

    formula = Formula(rule, state=zeros("mu", "nu"), constants=constants)
    return leafwise(
        "lamb",
        lr,
        formula,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        options={"b1": b1, "b2": b2, "eps": eps},
    )


def _trust_ratio(leaf: Tensors, step: Tensors) -> Tensors:
    """Return norm(parameter) / norm(step) for each parameter, or 1 where one of them is zero."""
    if not isinstance(leaf, Column):
        return _ratio(torch.linalg.vector_norm(leaf), torch.linalg.vector_norm(step))
    return Column(list(_ratio(torch.stack(leaf.norm().tensors), torch.stack(step.norm().tensors)).unbind()))


def _ratio(param_norm: Tensor, step_norm: Tensor) -> Tensor:
    return torch.where((param_norm > 0) & (step_norm > 0), param_norm / step_norm, 1.0)
