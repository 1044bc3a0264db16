"""Whether the loss of a batch is the mean of the losses of its examples, so that a batch may be split."""

from __future__ import annotations

import functools
import warnings

from ftrain import tree
from ftrain.step.evaluate import EvalStep
from ftrain.step.microbatch import most_pieces, split_batch
from ftrain.types import Loss, PyTree, TrainState

TOLERANCE, NARROW_TOLERANCE = 1e-3, 2e-2
"""Relative differences up to which two losses count as the same: in 32 bits or more, and with parameters or products in
16 bits."""


def warn_of_pieces(function: str, loss: Loss, state: TrainState, batch: PyTree, *, is_first: bool = True) -> None:
    """Warn when splitting a batch changes its loss, as its first two examples show.

    The loss of the two together is compared with the combined losses of each alone, evaluated without dropout or a
    gradient. They differ if the loss is a sum, a plain mean over tokens whose number differs between examples, or if it
    compares examples. There is no warning for a loss that cannot be evaluated so. Waits for the device. The message
    begins with `function`, that which splits the batch. Of many ranks all evaluate, and the first one warns.
    """
    if most_pieces(batch) < 2:
        return
    step, (first, second, *_) = EvalStep(loss), split_batch(batch, most_pieces(batch))
    pair = tree.map(lambda leaf: leaf[:2] if tree.is_tensor(leaf) and leaf.ndim else leaf, batch)
    try:
        means = [step(state, part)["loss"] for part in (pair, first, second)]
    except Exception:  # Of any kind: some losses need training mode, or more examples.
        return
    combined = functools.reduce(lambda a, b: a + b, means[1:])
    narrow = loss.narrow or any(leaf.itemsize < 4 for leaf in tree.leaves(state.params))
    together, separate, *single = (float(mean) for mean in (means[0], combined, *means[1:]))
    if is_first and abs(together - separate) > (NARROW_TOLERANCE if narrow else TOLERANCE) * max(
        map(abs, (together, *single))
    ):
        warnings.warn(
            f"{function}: the loss of two examples is {together:.4g}, and over each alone {separate:.4g}, so that the "
            "update depends on how a batch is cut. Return ft.Mean(total, weight): of a sum over examples with their "
            "number as weight (and a learning rate for the mean), of a mean over tokens with theirs. A loss that "
            "compares the examples of a batch cannot be split without changing it",
            stacklevel=4,
        )
