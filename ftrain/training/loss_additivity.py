"""Whether the loss of a batch is the mean of the losses of its examples, so that a batch may be split."""

from __future__ import annotations

import warnings

from ftrain import tree
from ftrain.step.evaluate import EvalStep
from ftrain.step.loss_of_pieces import combined, is_combined
from ftrain.step.microbatch import most_pieces
from ftrain.types import Loss, Mean, PyTree, TrainState


def warn_of_pieces(function: str, loss: Loss, state: TrainState, batch: PyTree, *, is_first: bool = True) -> None:
    """Warn when splitting a batch changes its loss, as pairs of its examples show.

    The loss of the first example together with the second, the middle and the last one is compared with the combined
    losses of each alone, evaluated without dropout or a gradient. They differ if the loss is a sum, a plain mean over
    tokens whose number differs between examples, or if it compares examples. There is no warning for a loss that cannot
    be evaluated so. Waits for the device. The message begins with `function`, that which splits the batch. Of many
    ranks all evaluate, and the first one warns.
    """
    count, step = most_pieces(batch), EvalStep(loss)
    if count < 2:
        return

    def mean_of(examples: slice) -> Mean:
        part = tree.map(lambda leaf: leaf[examples] if tree.is_tensor(leaf) and leaf.ndim else leaf, batch)
        mean: Mean = step(state, tree.to(part, tree.device_of(state.params)))["loss"]
        return mean

    try:
        first = mean_of(slice(1))
        # Always three, so that ranks with different numbers of examples evaluate equally often.
        pairs = [
            (mean_of(slice(0, other + 1, other)), mean_of(slice(other, other + 1)))
            for other in (1, count // 2, count - 1)
        ]
    except Exception:  # Of any kind: some losses need training mode, or more examples.
        return
    for pair, other in pairs:
        if is_first and not is_combined(loss, state.params, pair, (first, other)):
            together, separate = float(pair), combined((first, other))
            warnings.warn(
                f"{function}: the loss of two examples is {together:.4g}, and over each alone {separate:.4g}, so that "
                "the update depends on how a batch is cut. Return ft.Mean(total, weight): of a sum over examples with "
                "their number as weight (and a learning rate for the mean), of a mean over tokens with theirs. A loss "
                "that compares the examples of a batch cannot be split without changing it",
                stacklevel=4,
            )
            return
