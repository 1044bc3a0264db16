"""AdamW that averages its iterates, instead of a schedule that ends."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import StructureError, require_range
from ftrain.optim.bias_correction import counted, debias
from ftrain.optim.elementwise import (
    COUNT,
    NONE,
    Number,
    Part,
    approach,
    average_squares,
    descend,
    leafwise,
    require_ranges,
)
from ftrain.tree.name_patterns import Mask, matrices
from ftrain.types import Optimizer, PyTree, Schedule

KEYS = COUNT, "weights", "peak", "b1", "z", "nu"


def schedule_free_adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mask: Mask = matrices,
) -> Optimizer:
    r"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682).

    The parameters that are trained are :math:`y = (1 - \beta_1) z + \beta_1 x`, where :math:`x` averages the
    :math:`z`, and is what to evaluate, save and use: `schedule_free_params` gives it. With :math:`t` counting from 1:

    .. math::
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= \frac{g}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda y \\
        z &\leftarrow z - \eta u \\
        x &\leftarrow (1 - c) x + c z \quad\text{with } c = w_t / \sum_{i=1}^t w_i,\;
            w_t = (\max_{i \le t} \eta_i)^2

    Give a rate that warms up and stays, ``warmup_constant``. The state is `count`, `weights` (the sum of the
    :math:`w`), `peak` (the largest rate) and `b1`, all 0-d, and `z` and `nu`; as much as AdamW's, :math:`x` being
    worked out from `z` and the parameters.

    Args:
        lr: learning rate :math:`\eta`, a number or a schedule.
        b1: how near the trained parameters are to the average, in (0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`.
        decay_mask: ``(name, leaf) -> bool``, which parameters decay; those with two axes or more,
            unless told.

    Raises:
        OptionError: for a constant out of its range.
    """
    require_range("schedule_free_adamw", "b1", b1, 1e-3, 1.0)
    require_ranges("schedule_free_adamw", 1.0, b2=b2, eps=eps)
    require_ranges("schedule_free_adamw", weight_decay=weight_decay)

    exact = torch.zeros((), dtype=torch.float64)

    def constants(rate: Number, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        peak = shared["peak"].clamp_(min=rate)
        weight = peak * peak
        weights = shared["weights"].add_(weight)
        shared["b1"].fill_(b1)
        share = torch.where(weights > 0, weight / weights, 0.0)
        # The root of the second moment's bias goes to the steps, so that nothing but eps is added to the denominator.
        root = debias(b2, counted(shared[COUNT])).sqrt()
        size = rate * root
        return size, size * (1 - b1 * (1 - share)), share, eps * root, -weight_decay / root

    def rule(part: Part, size: Number, step: Number, share: Number, least: Number, decay: Number) -> None:
        y, z, g = part.leaf, part.state["z"], part.grad
        u = g.div(average_squares(part.state["nu"], g, b2).sqrt().add_(least))
        if weight_decay and part.decay:
            descend(u, y, decay)
        # y after the step, from y, z and u before it, without x.
        approach(y, z, share)
        descend(y, u, step)
        descend(z, u, size)

    return leafwise(
        "schedule_free_adamw",
        lr,
        rule,
        state={"z": torch.clone, "nu": torch.zeros_like},
        shared={COUNT: NONE, "weights": exact, "peak": exact, "b1": exact + b1},
        constants=constants,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
    )


def schedule_free_params(params: PyTree, opt_state: PyTree) -> PyTree:
    r"""Return the average :math:`x = (y - (1 - \beta_1) z) / \beta_1` of `schedule_free_adamw`, to evaluate and save.

    Args:
        params: the trained parameters, :math:`y`.
        opt_state: the state of the optimizer beside them.

    Raises:
        StructureError: when the state is of another optimizer.

    >>> import ftrain as ft
    >>> step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.schedule_free_adamw(0.1))
    >>> state, _ = step(step.init({"w": torch.ones(1)}), torch.ones(1))
    >>> ft.optim.schedule_free_params(state.params, state.opt_state)["w"]
    tensor([0.9000])
    """
    if not isinstance(opt_state, Mapping) or opt_state.keys() != set(KEYS):
        raise StructureError(
            "schedule_free_params: the optimizer state is not that of schedule_free_adamw; of a partition, give the "
            "part of its label"
        )
    share = opt_state["b1"]
    return tree.map(lambda y, z: z + (y - z) / share.to(y.device, y.dtype), params, opt_state["z"])
