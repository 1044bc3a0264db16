"""Gradient accumulation that equals the full batch, whatever the weights of the microbatches are."""

from __future__ import annotations

from torch import Tensor

from ftrain.errors import log_on_first_rank, require_positive
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
    its first axis, and so are lists and tuples with a value for each example; 0-d tensors and other leaves go to every
    microbatch. Buffers are passed from one microbatch to the next: batch statistics are those of one microbatch. Only
    one set of gradients exists at a time, or two where another wrapper reads those of a microbatch (`clip` inside).

    If `n` does not divide the batch, the first microbatches have one example more; if there are fewer than `n`
    examples, each is a microbatch. On many ranks (`ftrain.sharded`) each splits its own examples. Sums have the dtype
    of the parameters: in bfloat16, 64 microbatches add 1% to the error of a gradient.

    Counter-based dropout is that of the full batch too: what a loss draws from its key (`ftrain.random`), and what
    stock modules draw in a step that is compiled whole.

    A loss that is a plain number has the weight 1 per example, which is right for a mean over examples, and not for a
    sum, a mean over tokens or a loss that compares examples: `fit` tests this once and warns.

    Raises:
        OptionError: when `n` is not a positive whole number.
        BatchError: from the step, for axes of unequal length or a batch without examples.
    """
    require_positive("accumulate", "n", n)

    def wrap(grad: GradFn) -> GradFn:
        is_first = True

        def accumulating(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            nonlocal is_first
            microbatches = split_batch(batch, n, require_examples=f"accumulate({n})")
            # A later batch may be small because it is the last one of an epoch.
            if is_first and len(microbatches) < n:
                log_on_first_rank(
                    f"accumulate({n}): the first batch has examples for only {len(microbatches)} of {n} microbatches. "
                    f"A batch is split, and not joined with others: to accumulate over {n} batches, make the batches "
                    f"of the loader {n} times as large"
                )
            is_first = False
            with with_example_lists(example_lists(batch)):
                return accumulate_grads(grad, state, microbatches, rng)

        return accumulating

    return Wrapper(NAME, f"accumulate({n})", grad=OnGrad(wrap, microbatches=n, by_element=True), innermost=True)
