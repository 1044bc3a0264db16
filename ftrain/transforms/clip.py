"""Gradient clipping, by global norm or by value."""

from __future__ import annotations

import math

from torch import Tensor

from ftrain import tree
from ftrain.errors import OptionError, require_positive_number
from ftrain.step.loss_forms import report
from ftrain.step.wrapper import OnGrad, Wrapper, wrapper
from ftrain.tree.fast_flatten import Flattener
from ftrain.types import GradFn, Gradients, PyTree, TrainState, replace

EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""

DEFAULT_NORM = 1.0
"""The default limit. It is compared by identity: any other object, even another 1.0, is an argument of the caller."""


@wrapper
def clip(max_norm: float = DEFAULT_NORM, *, value: float | None = None) -> Wrapper:
    """Limit the gradient to a global norm (Pascanu et al. 2013, arXiv:1211.5063) or each element to a range.

    The metric `grad_norm` is the norm before clipping. Equals `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.

    Args:
        max_norm: largest Euclidean norm of all gradients together; ``inf`` only reports the norm.
        value: largest magnitude of an element. Pass only one of the two.

    Raises:
        OptionError: when both are given, or the limit is not positive.
    """
    if max_norm is not DEFAULT_NORM and value is not None:
        raise OptionError(f"clip: found max_norm={max_norm!r} and value={value!r}; needs one of them")
    limit = max_norm if value is None else value
    only_reports = value is None and limit == math.inf
    if not only_reports:
        require_positive_number("clip", "the limit", limit)

    def wrap(grad: GradFn) -> GradFn:
        flatten = Flattener()

        def clipping(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            gradients = grad(state, batch, rng)
            leaves, spec = flatten(gradients.grads)
            # From here on only the list refers to the gradients, so that each is freed when it has been clipped.
            gradients = replace(gradients, grads=None)
            norm = tree.norm_of(leaves)
            if value is not None:
                for index, leaf in enumerate(leaves):
                    leaves[index] = leaf.clamp(-limit, limit)
            elif not only_reports:
                factor = (norm + EPSILON).reciprocal_()
                if limit != 1:
                    factor = factor.mul_(limit)
                tree.scale_in_turn(leaves, factor.clamp_(max=1.0))
            metrics = report(gradients.metrics, "clip", grad_norm=norm)
            return replace(gradients, grads=spec.unflatten(leaves), metrics=metrics)

        return clipping

    quantity = "value" if value is not None else "norm"
    return Wrapper("clip", f"clip({quantity}<={limit:g})", grad=OnGrad(wrap, reads_norm=True, by_element=True))
