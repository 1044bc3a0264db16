"""Gradient accumulation that equals the full batch, whatever the weights of the microbatches are."""

from __future__ import annotations

from torch import Tensor

from ftrain.errors import require_positive
from ftrain.step.accumulation import accumulate_grads
from ftrain.step.microbatch import example_lists, split_batch, with_example_lists
from ftrain.step.wrapper import OnGrad, Wrapper, wrapper
from ftrain.types import GradFn, Gradients, PyTree, TrainState

NAME = "accumulate"


@wrapper
def accumulate(n: int) -> Wrapper:
    r"""Compute the gradient of a batch in `n` microbatches, one after the other.

    With the weight :math:`w_i` of the `Mean` that microbatch i returns,

    .. math:: g = \sum_i w_i g_i \Big/ \sum_i w_i

    which is the gradient of the full batch for any weights. Every tensor and NumPy array of the batch is split along
    its first axis, and so are lists and tuples that have a value for each example, such as lengths or texts; 0-d
    tensors and other leaves go to every microbatch. Buffers are passed from one microbatch to the next, so that batch
    statistics are those of each microbatch. Only one set of gradients exists; two where another wrapper reads those of
    a microbatch (`clip` inside).

    If `n` does not divide the batch, the first microbatches have one example more. If the batch has fewer than `n`
    examples, each is a microbatch. On many ranks (`ftrain.sharded`) each then splits its own examples.

    Sums have the dtype of the parameters. With parameters in bfloat16 use few microbatches: 64 add 1% to the error of a
    gradient, and beyond 256 most of them are lost.

    Counter-based dropout is that of the full batch too: what a loss draws from its key with `ftrain.random`
    (`ftrain.random.for_examples`), and what stock modules draw in a step that is compiled whole. Elsewhere stock
    modules draw from torch's generators, one microbatch after the other.

    A loss that is a plain number has the weight 1 per example, which is right for a mean over examples. A sum, a
    mean over tokens or a loss that compares examples has another gradient in microbatches: `fit` tests this once and
    warns. The step alone and `iterate` do not test it.

    Args:
        n: number of microbatches.

    Raises:
        OptionError: when `n` is not a positive whole number.
        BatchError: from the step, for axes of unequal length or a batch without examples.
    """
    require_positive("accumulate", "n", n)

    def wrap(grad: GradFn) -> GradFn:
        def accumulating(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            microbatches = split_batch(batch, n, require_examples=f"accumulate({n})")
            with with_example_lists(example_lists(batch)):
                return accumulate_grads(grad, state, microbatches, rng)

        return accumulating

    return Wrapper(NAME, f"accumulate({n})", grad=OnGrad(wrap, microbatches=n), innermost=True)
