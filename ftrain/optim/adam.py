"""Adam with coupled (L2) weight decay, AdamW with decoupled weight decay, and AdamW with moments of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ftrain.errors import require_positive, require_switches
from ftrain.optim.column import Part
from ftrain.optim.formats import Codes
from ftrain.optim.formula import Formula, Number, debias, descend_quotient, require_ranges, zeros
from ftrain.optim.leafwise import leafwise
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

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Arguments and state are those of `adamw`, except that by default all parameters decay (`decay_mask`). Prefer `adamw`
    for weight decay.
    """
    storage = low_precision("adam", state_dtype, stochastic_rounding, _moments(amsgrad))
    options: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "decay_mask": decay_mask}
    return _adam("adam", lr, amsgrad=amsgrad, maximize=maximize, storage=storage, decoupled=False, **options)


def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Schedule = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    state_dtype: Literal["bf16", "fp32"] | None = None,
    stochastic_rounding: bool | None = None,
    decay_mask: Mask = matrices,
) -> Optimizer:
    r"""Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \eta \lambda p
            - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    The state is `count` (0-d float32, as torch's fused kernels need it), `mu` and `nu` (shapes and dtypes of the
    parameters, or `state_dtype`), and with `amsgrad` also `nu_max`. Steps that a wrapper skips do not count.

    To save memory, ``state_dtype="bf16"`` halves the moments, and ``stochastic_rounding=True`` trains bfloat16
    parameters without a float32 copy. Values are then rounded up or down at random, with the key of the step, so that
    the mean of the result is the value. Rounding to the nearest would lose changes of less than 0.2%, and with them
    the decay of :math:`v`.

    Besides the arguments that `ftrain.optim` describes:

    * `amsgrad`: divide by the largest :math:`v` so far (Reddi et al. 2018, arXiv:1904.09237).
    """
    storage = low_precision("adamw", state_dtype, stochastic_rounding, _moments(amsgrad))
    options: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "decay_mask": decay_mask}
    return _adam("adamw", lr, amsgrad=amsgrad, maximize=maximize, storage=storage, decoupled=True, **options)


def adamw_8bit(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Schedule = 0.0,
    block: int = 256,
    min_size: int = 4096,
    stochastic_rounding: bool = False,
    decay_mask: Mask = matrices,
) -> Optimizer:
    r"""AdamW with moments of 8 bits, quantised in blocks (Dettmers et al. 2021, arXiv:2110.02861).

    The update is that of `adamw`, in float32. Between updates the moments are stored as codes: `mu` and `nu` (uint8,
    shapes of the parameters), with the scales `mu_scale` and `nu_scale` (float32, shape (blocks,)). That is
    ``2 + 8 / block`` bytes for each parameter element, where `adamw` takes 8. A code of `nu` stands for at least 3e-7
    of the largest value of its block, so that no element takes longer steps for having a small gradient.

    Besides the arguments that `ftrain.optim` describes:

    * `block`: number of elements that share a scale; the last block of a parameter may have fewer.
    * `min_size`: parameters with fewer elements (norms and biases) have moments in float32 and empty scales.
    * `stochastic_rounding`: round parameters that are stored in bfloat16 up or down at random.
    """
    require_positive("adamw_8bit", "block", block)
    require_positive("adamw_8bit", "min_size", min_size)
    require_switches("adamw_8bit", stochastic_rounding=stochastic_rounding)
    formats = {
        "mu": Codes(signed=True, block=block, min_size=min_size),
        "nu": Codes(signed=False, block=block, min_size=min_size),
    }
    shown = {
        f"block={block}": block != 256,
        f"min_size={min_size}": min_size != 4096,
        "stochastic_rounding": stochastic_rounding,
    }
    storage = Storage(formats, stochastic_rounding, tuple(text for text, is_shown in shown.items() if is_shown))
    options: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    return _adam("adamw_8bit", lr, decay_mask=decay_mask, storage=storage, decoupled=True, **options)


def _moments(amsgrad: bool) -> list[str]:
    return ["mu", "nu", "nu_max"] if amsgrad else ["mu", "nu"]


def _adam(
    name: str,
    lr: float | Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float | Schedule,
    decay_mask: Mask,
    storage: Storage | None,
    decoupled: bool,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    b1, b2, eps = require_ranges(name, 1.0, b1=b1, b2=b2, eps=eps)

    def constants(rate: Number, count: Tensor, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        return rate / debias(b1, count), debias(b2, count).sqrt()

    def rule(part: Part, step_size: Number, nu_correction: Number) -> None:
        g = part.descent(maximize=maximize, l2=not decoupled)
        mu = part.state["mu"].lerp_(g, 1 - b1)
        nu = part.state["nu"].mul_(b2).addcmul_(g, g, value=1 - b2)
        largest = part.state["nu_max"].clamp_min_(nu) if amsgrad else nu
        descend_quotient(part.leaf, mu, largest.sqrt().div_(nu_correction).add_(eps), step_size)

    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    fixed = {"beta1": b1, "beta2": b2, "eps": eps, "amsgrad": amsgrad, "maximize": maximize}

    def fused(part: Part, counts: list[Tensor], **common: Any) -> None:
        moments = part.state["mu"], part.state["nu"], part.state.get("nu_max", [])
        kernel(part.leaf, part.grad, *moments, counts, **fixed, **common)

    formula = Formula(
        rule, state=zeros(*_moments(amsgrad)), constants=constants, fused=fused, by_element=True, decoupled=decoupled
    )
    return leafwise(
        name,
        lr,
        formula,
        storage=storage,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        shown={"amsgrad": amsgrad, "maximize": maximize},
        options={"b1": b1, "b2": b2, "eps": eps},
    )
