"""Gradient accumulation that equals the full batch, however unevenly its weights are spread."""

from __future__ import annotations

from torch import Tensor

from ftrain.errors import require_positive
from ftrain.step.accumulation import accumulate_grads
from ftrain.step.microbatch import split_batch
from ftrain.step.wrapper import OnGrad, Wrapper, wrapper
from ftrain.types import GradFn, Gradients, PyTree, TrainState

NAME = "accumulate"


@wrapper
def accumulate(n: int) -> Wrapper:
    r"""Compute the gradient of a batch in `n` equal pieces, one after the other.

    With the weight :math:`w_i` of the `Mean` that microbatch i returns,

    .. math:: g = \sum_i w_i g_i \Big/ \sum_i w_i

    which is the gradient of the full batch for any weights. Every tensor of the batch is cut along
    its first axis; 0-d tensors and other leaves go to every piece. Buffers are handed from piece to
    piece, so that batch statistics are of each piece. The backward pass adds each gradient to its sum as it comes, so
    that one set of gradients exists; where another wrapper sees those of each piece first (`clip` inside), two.

    Dropout is that of the full batch too where it is counter-based: what a loss draws by its own key, with
    `ftrain.random`, and what stock modules draw in a step that is compiled whole. Each example then has the same
    random numbers however the batch is cut; `ftrain.random.for_examples` says which draws are by example. Eagerly
    and in a split-compiled step stock modules draw from torch's generators, each piece after the one before.

    A loss that is a plain number counts once for each microbatch, which is right for a mean over examples. One that is
    a sum, a mean over tokens or a comparison of examples has another gradient in pieces: `fit` evaluates two examples
    together and alone, once, when it first reads metrics, and warns if it is so.

    Args:
        n: number of microbatches; divides the first axis of every tensor in the batch.

    Raises:
        OptionError: when `n` is not a positive whole number.
        BatchError: from the step, for an axis that `n` does not divide, or axes of unequal length.
    """
    require_positive("accumulate", "n", n)

    def wrap(grad: GradFn) -> GradFn:
        def accumulating(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            microbatches = split_batch(batch, n, require_equal=f"accumulate({n})")
            return accumulate_grads(grad, state, microbatches, rng)

        return accumulating

    return Wrapper(NAME, f"accumulate({n})", grad=OnGrad(wrap, microbatches=n), innermost=True)
