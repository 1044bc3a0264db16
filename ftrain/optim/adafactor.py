"""Adafactor: the second moment of a matrix is stored as the means of its rows and of its columns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ftrain.errors import OptionError, require_range
from ftrain.optim.column import Part
from ftrain.optim.formula import Formula, Number, require_ranges
from ftrain.optim.leafwise import leafwise
from ftrain.tree.name_patterns import Mask, everything
from ftrain.types import Optimizer, Schedule


def adafactor(
    lr: float | Schedule = 1e-2,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), as `torch.optim.Adafactor`.

    With :math:`t` counting from 1, for parameters with two axes or more (rows and columns are the last two):

    .. math::
        r &\leftarrow (1 - t^\tau) r + t^\tau \operatorname{mean}_{\text{columns}}(g^2) \\
        c &\leftarrow (1 - t^\tau) c + t^\tau \operatorname{mean}_{\text{rows}}(g^2) \\
        v &= r c / \max(\operatorname{mean}(r), \epsilon_1) \\
        u &= g / \max(\sqrt{v}, \epsilon_1) \\
        p &\leftarrow p - \eta \lambda p - \max(\epsilon_2, \operatorname{rms}(p)) \min(\eta, 1 / \sqrt t)
            \frac{u}{\max(1, \operatorname{rms}(u) / d)}

    For a vector, :math:`v` itself is averaged. The state is `count` (0-d float32), and for a parameter of shape
    (..., n, m) `row` of shape (..., n, 1) and `column` of shape (..., 1, m), of its dtype. For a vector, `row` is
    :math:`v` and `column` is empty.

    Besides the arguments that `ftrain.optim` describes:

    * `lr`: :math:`\eta`, the largest step relative to the parameter; a number or a schedule.
    * `beta2_decay`: :math:`\tau`, at most 0.
    * `eps`: :math:`\epsilon_1` (None: ``torch.finfo`` of the dtype) and :math:`\epsilon_2`.
    * `d`: the largest root mean square of an update before it is scaled, at least 1.

    Raises:
        OptionError: an argument is out of its range.
    """
    beta2_decay = require_range("adafactor", "beta2_decay", beta2_decay, float("-inf"), 0.0, closed=True)
    d = require_range("adafactor", "d", d, 1.0)
    if not isinstance(eps, tuple) or len(eps) != 2:
        raise OptionError(f"adafactor: eps is {eps!r}, needs a tuple (epsilon_1 or None, epsilon_2)")
    eps1 = None if eps[0] is None else require_range("adafactor", "eps[0]", eps[0], 0.0)
    eps2 = require_range("adafactor", "eps[1]", eps[1], 0.0)
    (weight_decay,) = require_ranges("adafactor", weight_decay=weight_decay)

    def constants(rate: Number, count: Tensor, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        return count**beta2_decay, torch.clamp(count**-0.5, max=rate) * d, 1 - rate * weight_decay

    def rule(part: Part, weight: Number, rate: Number, decay_factor: Number) -> None:
        p = part.leaf
        g = part.descent(maximize=maximize, l2=False)
        # Norms are root mean squares times this root; `rate` contains d. This saves divisions.
        root = max(p.numel(), 1) ** 0.5
        smallest = torch.finfo(p.dtype).eps if eps1 is None else eps1
        norm = torch.linalg.vector_norm(p).clamp_(min=eps2 * root)
        if part.weight_decay:
            p.mul_(decay_factor)
        v = _second_moment(g, part.state, weight, smallest)
        u = v.clamp_(min=smallest * smallest).rsqrt_().mul_(g)
        step_size = norm.mul_(rate).div_(torch.linalg.vector_norm(u).clamp_(min=root * d))
        p.addcmul_(u, step_size, value=-1)

    formula = Formula(rule, state={"row": _row, "column": _column}, constants=constants, foreach=False)
    return leafwise(
        "adafactor",
        lr,
        formula,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        shown={"maximize": maximize},
        options={"beta2_decay": beta2_decay, "eps": eps, "d": d},
    )


def _second_moment(grad: Tensor, state: Mapping[str, Tensor], weight: Number, smallest: float) -> Tensor:
    """Update the averages by the squared gradient, of this weight, and return the second moment that they stand for."""
    row, column, squares = state["row"], state["column"], grad * grad
    weight = weight.to(row.dtype) if isinstance(weight, Tensor) else weight
    if grad.ndim < 2:
        return row.lerp_(squares, weight).clone()
    if grad.numel() == 0:
        return squares
    row.lerp_(squares.mean(-1, keepdim=True), weight)
    column.lerp_(squares.mean(-2, keepdim=True), weight)
    return (row @ column).div_(row.mean(-2, keepdim=True).clamp_(min=smallest))


def _row(leaf: Tensor) -> Tensor:
    return leaf.new_zeros(*leaf.shape[:-1], 1) if leaf.ndim > 1 else torch.zeros_like(leaf)


def _column(leaf: Tensor) -> Tensor:
    return leaf.new_zeros(*leaf.shape[:-2], 1, leaf.shape[-1]) if leaf.ndim > 1 else leaf.new_zeros(0)
