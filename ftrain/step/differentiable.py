"""Check that a loss can be differentiated."""

from __future__ import annotations

from ftrain import tree
from ftrain.errors import LossError
from ftrain.types import Mean


def require_differentiable(mean: Mean, name: str) -> None:
    """Check that a loss depends on the parameters, and its weight does not.

    Raises:
        LossError: otherwise, or for a loss that is no floating-point number.
    """
    if not mean.total.is_floating_point():
        raise LossError(f"{name}: the loss is {tree.describe(mean.total)}; needs a floating-point tensor")
    if not mean.total.requires_grad:
        raise LossError(
            f"{name}: the loss does not depend on the parameters (it has no grad_fn); look for .detach(), "
            ".item(), torch.no_grad(), torch.utils.checkpoint with use_reentrant=True, or a computation that does not "
            "read its first argument"
        )
    if mean.weight.requires_grad:
        raise LossError(f"{name}: the weight of the Mean depends on the parameters; detach it")
