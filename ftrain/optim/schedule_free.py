"""Schedule-free AdamW: an average of the iterates in place of a decaying learning rate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import StructureError, listed, require_range
from ftrain.optim.column import Part
from ftrain.optim.formula import COUNT, Formula, Number, debias, descend, require_ranges
from ftrain.optim.leafwise import leafwise
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

    The trained parameters are :math:`y = (1 - \beta_1) z + \beta_1 x`, where :math:`x` is the average of the
    :math:`z`. Evaluate, save and use :math:`x`, which `schedule_free_params` returns.

    .. math::
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= \frac{g}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda y \\
        z &\leftarrow z - \eta u \\
        x &\leftarrow (1 - c) x + c z \quad\text{with } c = w_t / \sum_{i=1}^t w_i,\;
            w_t = (\max_{i \le t} \eta_i)^2

    Use a learning rate that warms up and stays constant, ``warmup_constant``. The state is `count` (0-d float32),
    `weights` (the sum of the :math:`w`), `peak` (the largest rate) and `b1` (0-d float64), and `z` and `nu` (shapes and
    dtypes of the parameters): as much memory as AdamW's.

    Besides the arguments that `ftrain.optim` describes:

    * `b1`: :math:`\beta_1`, weight of the average in the trained parameters, in [0.001, 1).
    """
    b1 = require_range("schedule_free_adamw", "b1", b1, 1e-3, 1.0)
    b2, eps = require_ranges("schedule_free_adamw", 1.0, b2=b2, eps=eps)

    zero = torch.zeros((), dtype=torch.float64, device=tree.HOST)

    def constants(rate: Number, count: Tensor, shared: Mapping[str, Tensor]) -> tuple[Number, ...]:
        peak = shared["peak"].clamp_(min=rate)
        weight = peak * peak
        weights = shared["weights"].add_(weight)
        shared["b1"].fill_(b1)
        c = torch.where(weights > 0, weight / weights, 0.0)
        # The correction of the second moment goes to the rates, so that the denominator is sqrt(nu) + constant.
        nu_correction = debias(b2, count).sqrt()
        z_rate = rate * nu_correction
        y_rate = z_rate * (1 - b1 * (1 - c))
        return z_rate, y_rate, c, eps * nu_correction, -weight_decay / nu_correction

    def rule(part: Part, z_rate: Number, y_rate: Number, c: Number, scaled_eps: Number, decay_rate: Number) -> None:
        y, z, g = part.leaf, part.state["z"], part.grad
        nu = part.state["nu"].mul_(b2).addcmul_(g, g, value=1 - b2)
        u = g.div(nu.sqrt().add_(scaled_eps))
        if part.weight_decay:
            descend(u, y, decay_rate)
        # The new y is computed from the old y, z and u, without x: y <- (1 - c) y + c z - y_rate u.
        y = y.add_(z.sub(y).mul_(c)) if isinstance(c, Tensor) else y.lerp_(z, c)
        descend(y, u, y_rate)
        descend(z, u, z_rate)

    formula = Formula(
        rule,
        state={"z": torch.clone, "nu": torch.zeros_like},
        shared={"weights": zero, "peak": zero, "b1": zero + b1},
        constants=constants,
        by_element=True,
    )
    return leafwise(
        "schedule_free_adamw",
        lr,
        formula,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        options={"b1": b1, "b2": b2, "eps": eps},
    )


def schedule_free_params(params: PyTree, opt_state: PyTree) -> PyTree:
    r"""Return the average :math:`x = (y - (1 - \beta_1) z) / \beta_1` of `schedule_free_adamw`, to evaluate and save.

    Args:
        params: the trained parameters, :math:`y`.
        opt_state: the optimizer state of these parameters; or of some of them, as ``state.opt_state[label]`` of a
            `partition`: the others are returned as they are.

    Raises:
        StructureError: the state is that of another optimizer, or of other parameters.

    >>> import ftrain as ft
    >>> step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.schedule_free_adamw(0.1))
    >>> state, _ = step(step.init({"w": torch.ones(1)}), torch.ones(1))
    >>> ft.optim.schedule_free_params(state.params, state.opt_state)["w"]
    tensor([0.9000])
    """
    if not isinstance(opt_state, Mapping) or opt_state.keys() != set(KEYS):
        raise StructureError(
            "schedule_free_params: the optimizer state is not that of schedule_free_adamw; if this is within another "
            "optimizer, give its part: opt_state[label] of a partition, opt_state['state'] of an adjustable one"
        )
    b1, z = opt_state["b1"], opt_state["z"]

    def average(y: Tensor, z: Tensor) -> Tensor:
        if y.shape != z.shape:
            raise StructureError(
                f"schedule_free_params: a parameter is {tree.describe(y)}, and its state is {tree.describe(z)}, of "
                "another parameter; pass the parameters and the optimizer state of one state"
            )
        share: Tensor = b1.to(y.device, y.dtype)
        return z + (y - z) / share

    if tree.flatten(params)[1] == tree.flatten(z)[1]:
        return tree.map(average, params, z)
    z_by_name = dict(zip(tree.leaf_names(z), tree.leaves(z), strict=True))
    known = {*tree.leaf_names(params)}
    if others := [name for name in z_by_name if name not in known]:
        raise StructureError(f"schedule_free_params: the state has {listed(others)}, which the parameters do not have")
    return tree.map_named(lambda name, y: average(y, z_by_name[name]) if name in z_by_name else y, params)
