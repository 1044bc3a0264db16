"""Adam with decoupled weight decay."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain import tree
from ftrain.checks import require_range
from ftrain.optim.leaves import (
    DecayMask,
    Plan,
    Planner,
    like,
    matrices,
    own,
    pick,
    settled,
)
from ftrain.schedules import as_schedule
from ftrain.types import Hyper, Optimizer, PyTree, Schedule


def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mask: DecayMask = matrices,
) -> Optimizer:
    r"""Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    With :math:`t` counting from 1:

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \eta \lambda p
            - \eta \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    The state is `count` (0-d float32, as torch's kernels want it), `mu` and `nu` (like the parameters).
    Steps that a wrapper skips do not count.

    Args:
        lr: learning rate :math:`\eta`, a number or a schedule.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`.
        decay_mask: ``(name, leaf) -> bool``, which parameters decay; those with two axes or more,
            unless told.

    Raises:
        OptionError: for a constant out of its range.
    """
    for name, value, high in (("b1", b1, 1.0), ("b2", b2, 1.0), ("eps", eps, 1.0)):
        require_range("adamw", name, value, 0.0, high)
    require_range("adamw", "weight_decay", weight_decay, 0.0)
    if isinstance(lr, int | float) and lr < 0:
        require_range("adamw", "lr", lr, 0.0)
    schedule = as_schedule(lr)
    planner = Planner(decay_mask)

    def init(params: PyTree) -> PyTree:
        device = next((leaf.device for leaf in tree.leaves(params)), None)
        count = torch.zeros((), dtype=torch.float32, device=device)
        return {
            "count": count,
            "mu": tree.map(torch.zeros_like, params),
            "nu": tree.map(torch.zeros_like, params),
        }

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        (leaves, gradients, mu, nu), spec = planner.columns(params, grads, opt_state["mu"], opt_state["nu"])
        plan = planner.of(spec, leaves, gradients, mu, nu)
        if isinstance(hyper["lr"], Tensor) or not plan.fusible:
            count = opt_state["count"] + 1
            leaves, mu, nu = plain(gradients, mu, nu, leaves, plan.decays, count, hyper["lr"])
        else:
            count = opt_state["count"].add_(1) if donate else opt_state["count"] + 1
            leaves, mu, nu = own(leaves, donate), own(mu, donate), own(nu, donate)
            fused(gradients, mu, nu, leaves, plan, count, hyper["lr"])
        params, _, mu, nu = tree.unflatten(spec, [*leaves, *gradients, *mu, *nu])
        return params, {"count": count, "mu": mu, "nu": nu}

    def plain(
        grads: list[Tensor],
        mu: list[Tensor],
        nu: list[Tensor],
        leaves: list[Tensor],
        decays: list[bool],
        count: Tensor,
        rate: Tensor | float,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        # Shared by all leaves, in float64 as on the host, so that only the leaves' own dtype rounds.
        steps = count.double()
        rate = torch.as_tensor(rate, dtype=steps.dtype, device=steps.device)
        step_size, root, shrink = settled(rate / (1 - b1**steps), torch.sqrt(1 - b2**steps), 1 - rate * weight_decay)
        new = []
        for grad, first, second, leaf, decay in zip(grads, mu, nu, leaves, decays, strict=True):
            first = torch.lerp(first, grad, 1 - b1)
            second = b2 * second + (1 - b2) * (grad * grad)
            denominator = second.sqrt() / root.to(leaf.dtype) + eps
            kept = leaf * shrink.to(leaf.dtype) if decay and weight_decay else leaf
            new.append((kept - step_size.to(leaf.dtype) * (first / denominator), first, second))
        columns = [list(column) for column in zip(*new, strict=True)] if new else [[], [], []]
        return columns[0], columns[1], columns[2]

    def fused(
        grads: list[Tensor],
        mu: list[Tensor],
        nu: list[Tensor],
        leaves: list[Tensor],
        plan: Plan,
        count: Tensor,
        rate: float,
    ) -> None:
        grads = grads if plan.aligned else like(grads, leaves)
        for indices, decay in plan.groups:
            torch._fused_adamw_(
                pick(indices, leaves),
                pick(indices, grads),
                pick(indices, mu),
                pick(indices, nu),
                [],
                [count] * len(indices),
                lr=rate,
                beta1=b1,
                beta2=b2,
                weight_decay=weight_decay if decay else 0.0,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )

    options = [f"weight_decay={weight_decay:g}"] * bool(weight_decay)
    return Optimizer(init, update, {"lr": schedule}, f"adamw({', '.join([repr(schedule), *options])})")
