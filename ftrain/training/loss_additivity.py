"""Check that the loss of a batch is the mean of the losses of its examples, so that a batch may be split."""

from __future__ import annotations

from contextlib import nullcontext

from ftrain import random, tree
from ftrain.errors import warn
from ftrain.random.torch_ops import Keyed
from ftrain.step.across_ranks import Share, evaluation_state
from ftrain.step.eval_step import EvalStep
from ftrain.step.microbatch import difference, most_pieces
from ftrain.types import Loss, Mean, PyTree, TrainState


def warn_if_not_additive(function: str, loss: Loss, state: TrainState, batch: PyTree, *, is_first: bool) -> None:
    """Warn if splitting a batch changes its loss. The warning names `function`, which splits it. Waits for the device.

    The loss of two examples together is compared with the mean of their losses alone, without dropout or a gradient.
    The pairs are the first example with the second, the middle and the last one. The losses differ if the loss is a sum
    or a plain mean over tokens, or if it compares examples. A loss that draws random numbers draws the same ones for an
    example alone and in a pair. There is no warning if an evaluation fails. All ranks evaluate, and the first one
    warns.
    """
    count, step = most_pieces(batch), EvalStep(loss)
    if count < 2:
        return
    whole, gathering = evaluation_state(loss, state, function)

    def loss_of(examples: slice, index: int = 0) -> Mean | None:
        """Return the loss of a slice of examples. Their random numbers are those of the examples `index` and later."""
        part = tree.map(lambda leaf: leaf[examples] if tree.is_tensor(leaf) and leaf.ndim else leaf, batch)
        share = Share(tree.to(part, tree.device_of(state.params)), True)
        try:
            with Keyed(random.key(0)) as stream, stream.for_examples(index, most_pieces(part), 0):
                return step.of_rank(whole, share)["loss"]
        except Exception:  # Some losses need training mode, or more examples.
            return None

    with gathering or nullcontext():
        first = loss_of(slice(1))
        # Always three, so that ranks evaluate equally often, whatever their examples are.
        pairs = [
            (loss_of(slice(0, other + 1, other)), loss_of(slice(other, other + 1), index=1))
            for other in (1, count // 2, count - 1)
        ]
    for pair, other in pairs:
        if not is_first or first is None or pair is None or other is None:
            continue
        losses = difference(loss, state.params, pair, (first, other))
        if losses:
            together, separate = losses
            warn(
                f"{function}: the loss of two examples is {together:.4g}, and over each alone {separate:.4g}, so that "
                "the update depends on how a batch is split. Return ft.Mean(total, weight): of a sum over examples the "
                "weight is their number (use a learning rate for the mean), of a mean over tokens the number of "
                "tokens; the total is a sum too: a mean times the weight. A loss that compares the examples of a batch "
                "cannot be split without changing it; ft.remat() saves memory with the whole batch. Ranks need not "
                "split it: ignore this if the loss gathers the features of all ranks, as in docs/parallel.md"
            )
            return
