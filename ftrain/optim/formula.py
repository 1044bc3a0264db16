"""The formula of an optimizer, and the building blocks of formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from ftrain.errors import require_range
from ftrain.optim.column import Tensors

Number: TypeAlias = Tensor | float
"""A float in eager mode; a 0-d tensor if it comes from the state, or in a graph."""

COUNT = "count"
"""Name of the 0-d state that counts updates."""

Rule: TypeAlias = Callable[..., None]
"""``(part, *constants)``: update one part in place."""

Constants: TypeAlias = Callable[[Number, Tensor, Mapping[str, Tensor]], tuple[Number, ...]]
"""``(rate, count, shared) -> constants``, the same for all leaves; may write the 0-d tensors of the state.

`count` is the number of this update, from 1: float64 if the device has it, so that only the results are rounded.
"""

Fused: TypeAlias = Callable[..., None]
"""``(part, counts, **common)``: update one part, which has lists of tensors, in place with a fused kernel of torch.

`counts` is a list with the count for each leaf, empty if the state has no count. `common` are the arguments that all
kernels take: `lr`, `weight_decay`, and `found_inf`, a 0-d float32 tensor or None. If it is 1, they do nothing.
"""


@dataclass(frozen=True, eq=False)
class Formula:
    """How an optimizer updates parameters, written with the in-place methods of a tensor."""

    rule: Rule
    state: Mapping[str, Callable[[Tensor], Tensor]]
    """The moments by name, as functions ``leaf -> initial value``."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """Further 0-d tensors of the state by name, with their initial values."""
    constants: Constants | None = None
    """Computes the further arguments of the rule; the state then counts updates. Default: the rate alone."""
    fused: Fused | None = None
    """The formula as a fused kernel of torch; used in eager mode if leaves and device allow it."""
    fused_in_16_bits: bool = True
    """Whether that kernel is correct for leaves of 16 bits."""
    foreach: bool = True
    """Whether the rule takes many leaves at a time in eager mode."""
    by_shape: bool = False
    """Whether the rule takes all leaves of one shape at a time, in graphs too."""
    by_element: bool = False
    """Whether the rule updates each element by itself, so that ranks can update parts of a leaf."""
    decoupled: bool = False
    """Whether the leaves decay before the rule, by ``1 - rate * weight_decay``; else the rule decays them."""


def zeros(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return `Formula.state` for moments of these names that start at zero."""
    return dict.fromkeys(names, torch.zeros_like)


def require_ranges(function: str, high: float = float("inf"), **values: float) -> list[float]:
    """Return constants in [0, `high`) as floats. Raises an OptionError for the first that is not."""
    return [require_range(function, name, value, 0.0, high) for name, value in values.items()]


def descend(leaf: Tensors, step: Tensors, rate: Number) -> Tensors:
    """Return ``leaf - rate step``, computed in place; the rate may be a tensor."""
    return leaf.sub_(step.mul(rate)) if isinstance(rate, Tensor) else leaf.add_(step, alpha=-rate)


def descend_quotient(leaf: Tensors, step: Tensors, denominator: Tensors, rate: Number) -> Tensors:
    """Return ``leaf - rate step / denominator``, computed in place; the rate may be a tensor.

    The step is multiplied by the rate: if the denominator were divided by it, a rate of zero would give 0 / 0.
    """
    if isinstance(rate, Tensor):
        return leaf.addcdiv_(step.mul(rate), denominator, value=-1)
    return leaf.addcdiv_(step, denominator, value=-rate)


def power(decay: float, count: Tensor) -> Tensor:
    """Return ``decay ** count``; for a count in float32 with an error of a few units in the last place."""
    # A power in float32 multiplies the rounding error of `decay`, a number close to 1, by the count.
    return (count * math.log(decay)).exp() if count.dtype == torch.float32 and decay else decay**count


def debias(decay: float, count: Tensor) -> Tensor:
    """Return ``1 - decay ** count``, the factor by which a moving average that starts at zero is too small."""
    if count.dtype == torch.float32 and decay:
        return -torch.expm1(count * math.log(decay))
    return 1 - decay**count
