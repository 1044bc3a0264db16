"""Lookahead: after every k steps the weights of another optimizer are reset to slow weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import ComposeError, require_positive, require_range
from ftrain.optim.partial_update import require_optimizer, wrap_split
from ftrain.optim.structure_cache import StructureCache, common_spec
from ftrain.types import Hyper, Optimizer, PyTree

NAME, SLOW, FAST = "lookahead", "slow", "fast"


def lookahead(optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> Optimizer:
    r"""Lookahead (Zhang et al. 2019, arXiv:1907.08610): every `k` steps, go back a part of the way that was made.

    .. math::
        s &\leftarrow s + \alpha\,(p - s) \\
        p &\leftarrow s

    after each :math:`k`-th step of `optimizer`, which keeps its moments. The state is `slow`, like the parameters, and
    `fast`, that of the optimizer. Steps are counted as in the state, and the metric ``lookahead`` is 1 for steps
    that reset the weights.

    Args:
        optimizer: the optimizer that makes the steps, any of `ftrain.optim`.
        k: number of steps between two resets.
        alpha: :math:`\alpha` in [0, 1], the share of the way that is kept.

    Raises:
        OptionError: a number is out of its range.
        ComposeError: `optimizer` is not an optimizer, is a lookahead, or is `adjustable`, which must be the outermost.
    """
    optimizer = require_optimizer(NAME, "the optimizer", optimizer)
    require_positive(NAME, "k", k)
    require_range(NAME, "alpha", alpha, 0.0, 1.0, closed=True)
    if NAME in optimizer.schedules:
        raise ComposeError("lookahead: the optimizer is a lookahead already; wrap it once")
    common = StructureCache(lambda specs, columns: common_spec(specs))

    def due(step: int) -> float:
        return float((step + 1) % k == 0)

    def init(params: PyTree) -> PyTree:
        return {SLOW: tree.clone(params), FAST: optimizer.init(params)}

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        params, fast = optimizer.update(grads, opt_state[FAST], params, hyper, donate=donate)
        if not isinstance(hyper[NAME], Tensor) and not hyper[NAME]:
            return params, {SLOW: opt_state[SLOW] if donate else tree.clone(opt_state[SLOW]), FAST: fast}
        spec, (slow, leaves) = common(opt_state[SLOW], params)
        slow, leaves = _synchronized(slow if donate else [*map(torch.clone, slow)], leaves, hyper[NAME], alpha)
        return tree.unflatten(spec, leaves), {SLOW: tree.unflatten(spec, slow), FAST: fast}

    return replace(
        optimizer,
        init=init,
        update=update,
        schedules={**optimizer.schedules, NAME: due},
        text=f"lookahead({optimizer.text}, {k}, {alpha:g})",
        name="",
        split=wrap_split(optimizer, lambda each: lookahead(each, k, alpha)),
    )


def _synchronized(
    slow: list[Tensor], leaves: list[Tensor], due: Tensor | float, alpha: float
) -> tuple[list[Tensor], list[Tensor]]:
    if isinstance(due, Tensor):
        now = due.to(slow[0].device) > 0
        slow = [torch.where(now, s.lerp(p, alpha), s) for s, p in zip(slow, leaves, strict=True)]
        return slow, [torch.where(now, s, p) for s, p in zip(slow, leaves, strict=True)]
    torch._foreach_lerp_(slow, leaves, alpha)
    torch._foreach_copy_(leaves, slow)
    return slow, leaves
