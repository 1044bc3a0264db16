"""Whether the loss of a batch is the mean of those of its examples, so that a batch may be taken in pieces."""

from __future__ import annotations

import functools
import warnings

from ftrain import tree
from ftrain.step.evaluate import EvalStep
from ftrain.step.microbatch import most_pieces, split_batch
from ftrain.types import Loss, PyTree, TrainState

SAME, SAME_NARROW = 1e-3, 2e-2
"""By how much losses may differ that are the same, relative to the largest of them; with parameters or products in 16
bits."""


def warn_of_pieces(function: str, loss: Loss, state: TrainState, batch: PyTree) -> None:
    """Warn when pieces of a batch have another loss than the batch has, as two of its examples show.

    The loss of the two together is compared with what those of each alone add up to, as numbers that are evaluated:
    without dropout or a gradient. It is a sum, or a mean over tokens of which the examples have unequal numbers, or it
    compares examples. Nothing is said of a loss that cannot be evaluated so. Waits for the device.

    Args:
        function: what takes the batch in pieces, for the message.
        loss: of the step.
        state: whose parameters it is evaluated with.
        batch: of which the first two examples are taken.
    """
    if most_pieces(batch) < 2:
        return
    step, (first, second, *_) = EvalStep(loss), split_batch(batch, most_pieces(batch))
    both = tree.map(lambda leaf: leaf[:2] if tree.is_tensor(leaf) and leaf.ndim else leaf, batch)
    try:
        means = [step(state, part)["loss"] for part in (both, first, second)]
    except Exception:  # Of whatever kind: some losses are for training alone, or for more examples.
        return
    joined = functools.reduce(lambda a, b: a + b, means[1:])
    narrow = loss.narrow or any(leaf.itemsize < 4 for leaf in tree.leaves(state.params))
    together, apart, *each = (float(mean) for mean in (means[0], joined, *means[1:]))
    if abs(together - apart) > (SAME_NARROW if narrow else SAME) * max(map(abs, (together, *each))):
        warnings.warn(
            f"{function}: the loss of two examples is {together:.4g}, and over each alone {apart:.4g}, so that the "
            "update depends on how a batch is cut. Return ft.Mean(total, weight): of a sum over examples with their "
            "number as weight (and a learning rate for the mean), of a mean over tokens with theirs. A loss that "
            "compares the examples of a batch cannot be taken in pieces without a change",
            stacklevel=4,
        )
