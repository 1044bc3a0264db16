"""Muon: the momentum of a matrix, made orthogonal by Newton-Schulz iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import OptionError, StructureError, require_choice, require_positive, require_switches
from ftrain.optim.column import Part
from ftrain.optim.formula import Formula, Number, descend, require_ranges, zeros
from ftrain.optim.leafwise import leafwise
from ftrain.optim.schedules.checks import number
from ftrain.tree.name_patterns import Mask, everything
from ftrain.types import Optimizer, PyTree, Schedule, replace

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of the polynomial of the iteration, from the paper; it is steep at zero."""

TINY = 16
"""Matrices with at most this many rows or columns are not batched: torch's CPU kernels round a few in 1,000 of them
differently in a batch than alone. 90,000 larger ones of twelve shapes were equal."""


def muon(
    lr: float | Schedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float | Schedule = 0.1,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ns_steps: int = 5,
    eps: float = 1e-7,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
    decay_mask: Mask = everything,
) -> Optimizer:
    r"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), as `torch.optim.Muon`.

    .. math::
        b &\leftarrow \mu b + (1 - \mu) g \\
        o &= \operatorname{NS}((1 - \mu) g + \mu b \text{ if nesterov else } b) \\
        p &\leftarrow p - \eta \lambda p - \eta \sqrt{\max(1, \text{rows} / \text{columns})}\; o

    where NS (Newton-Schulz) brings the singular values of a matrix near 1, by iterations of
    :math:`x \leftarrow a x + (b\,x x^\top + c\,(x x^\top)^2) x` in bfloat16 from :math:`x / \lVert x \rVert`.

    Every parameter must have two axes. Give embeddings, the last layer, and everything else to AdamW:

    >>> import ftrain as ft
    >>> def label(name, leaf):
    ...     return "muon" if leaf.ndim == 2 and "embed" not in name else "adamw"
    >>> ft.optim.partition({"muon": ft.optim.muon(0.02), "adamw": ft.optim.adamw(3e-4)}, label).text
    'partition(muon: muon(constant(0.02), weight_decay=0.1), adamw: adamw(constant(3e-4)))'

    The state is `momentum`, :math:`b` (shapes and dtypes of the parameters). Matrices of one shape are multiplied as a
    batch: 500 of 45 x 45 took a tenth of the time. On devices other than the CPU, a batch may be rounded, in bfloat16,
    differently from single matrices, which `update_in_backward` and `offload` use.

    Besides the arguments that `ftrain.optim` describes:

    * `momentum`: :math:`\mu` in [0, 1).
    * `nesterov`: use Nesterov momentum.
    * `ns_coefficients`: :math:`a, b, c`.
    * `ns_steps`: number of iterations.
    * `eps`: the smallest norm to divide by.
    * `adjust_lr_fn`: ``"original"``, as above, or ``"match_rms_adamw"``, with the factor
      :math:`0.2 \sqrt{\max(\text{rows}, \text{columns})}`, for learning rates of AdamW (arXiv:2502.16982).

    Raises:
        OptionError: an argument is out of its range.
        StructureError: at `init`, a parameter is not a matrix.
    """
    momentum, eps = require_ranges("muon", 1.0, momentum=momentum, eps=eps)
    require_positive("muon", "ns_steps", ns_steps)
    require_switches("muon", nesterov=nesterov)
    _require_choices(ns_coefficients, adjust_lr_fn)

    def rule(part: Part, rate: Number) -> None:
        g = part.grad
        rows, columns = part.like.shape
        if rows * columns == 0:
            return
        b = part.state["momentum"].lerp_(g, 1 - momentum)
        direction = g.lerp(b, momentum) if nesterov else b
        o = direction.like(_orthogonal(direction.tensors, ns_coefficients, ns_steps, eps))
        factor = max(1, rows / columns) ** 0.5 if adjust_lr_fn == "original" else 0.2 * max(rows, columns) ** 0.5
        descend(part.leaf, o, rate * factor)

    formula = Formula(rule, state=zeros("momentum"), by_shape=True, decoupled=True)
    optimizer = leafwise(
        "muon",
        lr,
        formula,
        weight_decay=weight_decay,
        decay_mask=decay_mask,
        options={
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
        },
    )

    def init(params: PyTree) -> PyTree:
        for name, leaf in zip(tree.leaf_names(params), tree.leaves(params), strict=True):
            if leaf.ndim != 2:
                raise StructureError(
                    f"muon: the parameter {name or 'params'} has the shape {list(leaf.shape)}, needs two axes; use "
                    "ft.optim.partition to give parameters that are not matrices to another optimizer"
                )
        return optimizer.init(params)

    return replace(optimizer, init=init)


def _orthogonal(
    matrices: list[Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[Tensor]:
    """Return matrices of one shape with singular values near 1; computed as a batch if that gives the same bits."""
    if len(matrices) == 1 or min(matrices[0].shape) <= TINY:
        return [_newton_schulz(matrix, coefficients, steps, eps) for matrix in matrices]
    return list(_newton_schulz(torch.stack(matrices), coefficients, steps, eps).unbind())


def _newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix (n, m) or a batch (b, n, m) after Newton-Schulz iterations in bfloat16, in its own dtype."""
    addmm: Callable[..., Tensor] = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    a, b, c = coefficients
    # Transposed if tall, so that the Gram matrix is the smaller of the two.
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    # In bfloat16, multiplying by a learning rate that is a tensor would round.
    return (x.mT if tall else x).to(matrix.dtype)


def _require_choices(ns_coefficients: tuple[float, ...], adjust_lr_fn: str) -> None:
    if not isinstance(ns_coefficients, Sequence) or len(ns_coefficients) != 3:
        raise OptionError(f"muon: ns_coefficients is {ns_coefficients!r}, needs three numbers")
    for index, each in enumerate(ns_coefficients):
        number("muon", f"ns_coefficients[{index}]", each)
    require_choice("muon", "adjust_lr_fn", adjust_lr_fn, ("original", "match_rms_adamw"))
