"""Sharpness-aware minimisation: the gradient at the parameters where the loss is highest nearby."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import require_positive_number
from ftrain.random import torch_ops
from ftrain.step.wrapper import OnGrad, Wrapper, wrapper
from ftrain.tree.fast_flatten import Flattener
from ftrain.types import GradFn, Gradients, PyTree, TrainState, replace

NAME = "sam"


@wrapper
def sam(rho: float = 0.05) -> Wrapper:
    r"""Take the gradient at the parameters where the loss is highest nearby (Foret et al. 2021, arXiv:2010.01412).

    .. math:: g = \nabla L(p + \rho\, \nabla L(p) / \lVert \nabla L(p) \rVert_2)

    with the distance :math:`\rho` and one norm over all parameters. A step runs forward and backward twice, with the
    same batch, random numbers (dropout) and buffers. Loss, metrics and new buffers (statistics of BatchNorm) are those
    of the first pass, at the parameters themselves. Where the gradient is zero, the parameters are not moved.

    Written after `accumulate`, it moves the parameters along the gradient of the whole batch; written before it, along
    that of each microbatch, which the paper calls m-sharpness.

    Raises:
        OptionError: when `rho` is not a positive number.
    """
    require_positive_number(NAME, "rho", rho)

    def wrap(grad: GradFn) -> GradFn:
        flatten = Flattener()

        def sharpness_aware(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            params, spec = flatten(state.params)
            same_draws = torch_ops.rng_snapshot(params[0].device, params)
            first = grad(state, batch, rng)
            moved = tree.unflatten(spec, _moved(params, tree.leaves(first.grads), rho))
            # Frees the first gradient, so that the second pass does not need memory for two.
            first = replace(first, grads=None)
            with same_draws():
                second = grad(replace(state, params=moved), batch, rng)
            finite = None
            if first.finite is not None and second.finite is not None:
                finite = first.finite & second.finite
            return replace(first, grads=second.grads, finite=finite)

        return sharpness_aware

    return Wrapper(NAME, f"sam({rho:g})", grad=OnGrad(wrap, evaluations=2, reads_norm=True, by_element=True))


def _moved(params: list[Tensor], grads: list[Tensor], rho: float) -> list[Tensor]:
    """Return the parameters moved by the distance `rho` along the gradient."""
    norm = tree.norm_of(grads)
    moved = tree.scale_leaves(grads, torch.where(norm > 0, rho / norm, 0.0))
    # In place, in the memory of the scaled gradients.
    torch._foreach_add_(moved, params)
    return moved
