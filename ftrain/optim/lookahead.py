"""Lookahead: after every k steps of an optimizer, its weights are reset to slowly moving ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import ComposeError, require_positive, require_range
from ftrain.optim.partial_update import require_optimizer, wrap_split
from ftrain.types import Hyper, Optimizer, PyTree

NAME, SLOW, FAST = "lookahead", "slow", "fast"


def lookahead(optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> Optimizer:
    r"""Lookahead (Zhang et al. 2019, arXiv:1907.08610): slow weights follow those of an optimizer.

    .. math::
        s &\leftarrow s + \alpha\,(p - s) \\
        p &\leftarrow s

    after each :math:`k`-th step of `optimizer`, whose moments are not reset. The state is `slow`, :math:`s`, like the
    parameters, and `fast`, the state of the optimizer. `TrainState.step` counts the steps. The metric ``lookahead`` is
    1 for steps that reset the weights, else 0.

    Args:
        optimizer: the optimizer that makes the steps, any of `ftrain.optim`.
        k: number of steps between two resets.
        alpha: :math:`\alpha` in [0, 1], the fraction by which the slow weights move.

    Raises:
        OptionError: a number is out of its range.
        ComposeError: `optimizer` is not an optimizer, is a lookahead, or is `adjustable`, which must be the outermost.
    """
    optimizer = require_optimizer(NAME, "the optimizer", optimizer)
    require_positive(NAME, "k", k)
    alpha = require_range(NAME, "alpha", alpha, 0.0, 1.0, closed=True)
    if NAME in optimizer.schedules:
        raise ComposeError("lookahead: the optimizer is a lookahead already; wrap it once")

    def is_reset(step: int) -> float:
        return float((step + 1) % k == 0)

    def init(params: PyTree) -> PyTree:
        return {SLOW: tree.clone(params), FAST: optimizer.init(params)}

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        params, fast = optimizer.update(grads, opt_state[FAST], params, hyper, donate=donate)
        slow = opt_state[SLOW] if donate else tree.clone(opt_state[SLOW])
        if isinstance(hyper[NAME], Tensor):
            reset = hyper[NAME].to(tree.device_of(params)) > 0
            slow = tree.map(lambda s, p: torch.where(reset, s.lerp(p, alpha), s), slow, params)
            params = tree.where(reset, slow, params)
        elif hyper[NAME] and (leaves := tree.leaves(params)):
            slow_leaves = tree.leaves(slow)
            torch._foreach_lerp_(slow_leaves, leaves, alpha)
            torch._foreach_copy_(leaves, slow_leaves)
        return params, {SLOW: slow, FAST: fast}

    return replace(
        optimizer,
        init=init,
        update=update,
        schedules={**optimizer.schedules, NAME: is_reset},
        text=f"lookahead({optimizer.text}, {k}, {alpha:g})",
        name="",
        split=wrap_split(optimizer, lambda part: lookahead(part, k, alpha)),
    )
