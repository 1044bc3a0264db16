"""Adam with coupled (L2) weight decay, AdamW with decoupled weight decay, and AdamW with moments of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ftrain.errors import require_positive
from ftrain.optim.bias_correction import debias, exact_count
from ftrain.optim.elementwise import (
    COUNT,
    ZERO_COUNT,
    Fused,
    Number,
    Part,
    average,
    average_squares,
    descend_quotient,
    leafwise,
    require_ranges,
)
from ftrain.optim.quantized import Codes
from ftrain.optim.state_dtype import Storage, low_precision
from ftrain.tree.name_patterns import Mask, everything, matrices
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
    state_dtype: Literal["bf16", "fp32"] | None = None,
    stochastic_rounding: bool | None = None,
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""Adam (Kingma and Ba 2015, arXiv:1412.6980), with coupled (L2) weight decay as in `torch.optim.Adam`.

    With :math:`t` counting from 1:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Arguments and state are those of `adamw`, except that by default all parameters decay (`decay_mask`). Prefer `adamw`
    for weight decay.

    Raises:
        OptionError: an argument is out of its range.
    """
    storage = low_precision("adam", state_dtype, stochastic_rounding, _moments(amsgrad))
    flags = {"amsgrad": amsgrad, "maximize": maximize, "decoupled": False}
    return _adam("adam", lr, (b1, b2), eps, weight_decay, decay_mask, storage=storage, **flags)


def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    state_dtype: Literal["bf16", "fp32"] | None = None,
    stochastic_rounding: bool | None = None,
    decay_mask: Mask = matrices,
) -> Optimizer:
    r"""Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    With :math:`t` counting from 1:

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \eta \lambda p
            - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    The state is `count` (0-d float32, as torch's fused kernels need it), `mu` and `nu` (shapes and dtypes of the
    parameters, or `state_dtype`), and with `amsgrad` also `nu_max`. Steps that a wrapper skips do not count.

    To save memory, ``state_dtype="bf16"`` halves the moments, and ``stochastic_rounding=True`` trains bfloat16
    parameters without a float32 copy. Values are then rounded up or down at random, with the key of the step, so that
    the mean of the result is the value. Rounded to the nearest, changes of less than 0.2% would be lost, and with them
    the decay of :math:`v`: its root was 5.3 times too large 4,500 steps after gradients fell tenfold. Rounded
    at random it was right on average, and within 6% for nine of ten elements.

    Args:
        lr: learning rate :math:`\eta`, a number or a schedule.
        b1: :math:`\beta_1`, decay rate of the first moment, in [0, 1).
        b2: :math:`\beta_2`, decay rate of the second moment, in [0, 1).
        eps: :math:`\epsilon`, added to the denominator.
        weight_decay: :math:`\lambda`, at least 0.
        amsgrad: divide by the largest :math:`v` so far (Reddi et al. 2018, arXiv:1904.09237).
        maximize: maximize the loss instead of minimizing it.
        state_dtype: dtype of the moments, ``"bf16"`` or ``"fp32"``; the update is then computed in float32. Default:
            the dtype of each parameter.
        stochastic_rounding: round moments and parameters that are stored in bfloat16 up or down at random. Default: if
            `state_dtype` is ``"bf16"``.
        decay_mask: ``(name, leaf) -> bool``, which parameters decay. Default: those with two axes or more.

    Raises:
        OptionError: an argument is out of its range.
    """
    storage = low_precision("adamw", state_dtype, stochastic_rounding, _moments(amsgrad))
    flags = {"amsgrad": amsgrad, "maximize": maximize, "decoupled": True}
    return _adam("adamw", lr, (b1, b2), eps, weight_decay, decay_mask, storage=storage, **flags)


def adamw_8bit(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    block: int = 256,
    min_size: int = 4096,
    stochastic_rounding: bool = False,
    decay_mask: Mask = matrices,
) -> Optimizer:
    r"""AdamW with moments of 8 bits, quantised in blocks (Dettmers et al. 2021, arXiv:2110.02861).

    The update is that of `adamw`, in float32. Between updates the moments are stored as codes: `mu` and `nu` (uint8,
    shapes of the parameters), with the scales `mu_scale` and `nu_scale` (float32, shape (blocks,)). That is
    ``2 + 8 / block`` bytes for each parameter element, where `adamw` takes 8.

    Args:
        lr: learning rate :math:`\eta`, a number or a schedule.
        b1: :math:`\beta_1`, decay rate of the first moment, in [0, 1).
        b2: :math:`\beta_2`, decay rate of the second moment, in [0, 1).
        eps: :math:`\epsilon`, added to the denominator.
        weight_decay: :math:`\lambda`, at least 0.
        block: number of elements that share a scale; the last block of a parameter may have fewer.
        min_size: parameters with fewer elements (norms and biases) have moments in float32 and empty scales.
        stochastic_rounding: round parameters that are stored in bfloat16 up or down at random.
        decay_mask: ``(name, leaf) -> bool``, which parameters decay. Default: those with two axes or more.

    Raises:
        OptionError: an argument is out of its range.
    """
    require_positive("adamw_8bit", "block", block)
    require_positive("adamw_8bit", "min_size", min_size)
    formats = {"mu": Codes(True, block, min_size), "nu": Codes(False, block, min_size)}
    shown = {f"block={block}": block != 256, "stochastic_rounding": stochastic_rounding}
    storage = Storage(formats, stochastic_rounding, tuple(text for text, is_shown in shown.items() if is_shown))
    return _adam("adamw_8bit", lr, (b1, b2), eps, weight_decay, decay_mask, storage=storage, decoupled=True)


def _moments(amsgrad: bool) -> list[str]:
    return ["mu", "nu", "nu_max"] if amsgrad else ["mu", "nu"]


def _adam(
    name: str,
    lr: float | Schedule,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decay_mask: Mask,
    *,
    storage: Storage | None,
    decoupled: bool,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    b1, b2 = betas
    require_ranges(name, 1.0, b1=b1, b2=b2, eps=eps)
    require_ranges(name, weight_decay=weight_decay)

    def constants(rate: Number, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        count = exact_count(shared[COUNT])
        return rate / debias(b1, count), debias(b2, count).sqrt(), 1 - rate * weight_decay

    def rule(part: Part, size: Number, root: Number, decay_factor: Number) -> None:
        p, mu, nu = part.leaf, part.state["mu"], part.state["nu"]
        g = part.descent(maximize=maximize, l2=0.0 if decoupled else weight_decay)
        average(mu, g, b1)
        average_squares(nu, g, b2)
        largest = part.state["nu_max"].clamp_min_(nu) if amsgrad else nu
        if decoupled and weight_decay and part.decay:
            p.mul_(decay_factor)
        descend_quotient(p, mu, largest.sqrt().div_(root).add_(eps), size)

    return leafwise(
        name,
        lr,
        rule,
        state=dict.fromkeys(_moments(amsgrad), torch.zeros_like),
        shared={COUNT: ZERO_COUNT},
        constants=constants,
        fused=_kernel(betas, eps, weight_decay, decoupled=decoupled, amsgrad=amsgrad, maximize=maximize),
        storage=storage,
        by_element=True,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        options={"amsgrad": amsgrad, "maximize": maximize},
    )


def _kernel(
    betas: tuple[float, float], eps: float, weight_decay: float, *, decoupled: bool, amsgrad: bool, maximize: bool
) -> Fused:
    kernel, (b1, b2) = torch._fused_adamw_ if decoupled else torch._fused_adam_, betas

    def fused(part: Part, rate: float, shared: Mapping[str, Tensor]) -> None:
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

    return fused
