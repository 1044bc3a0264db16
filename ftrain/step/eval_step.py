"""The loss of a batch without its gradient, as averages that can be added over batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.errors import ComposeError, LossError, warn
from ftrain.step.across_ranks import Share, evaluation_state, share_of, sum_means
from ftrain.step.forward import detach, run_loss
from ftrain.step.loss_forms import adapt, zero_if_empty
from ftrain.step.state_checks import require_state
from ftrain.step.wrapper import Wrapper
from ftrain.tree.fast_flatten import Flattener
from ftrain.types import Loss, Mean, PyTree, TrainState

Means: TypeAlias = Callable[[tuple[PyTree, PyTree, PyTree], PyTree], dict[str, Mean]]
"""``((params, frozen, buffers), batch) -> averages``: the loss and its metrics on the examples of one rank."""


@dataclass(frozen=True)
class EvalStep:
    """A function ``(state, batch) -> {name: Mean}``. Make one with `eval_step`.

    Args:
        loss: the loss that it evaluates.
        means: computes its averages, within the scope of the loss. Default: operation by operation.
    """

    loss: Loss
    means: Means | None = None

    def __call__(self, state: TrainState, batch: PyTree) -> dict[str, Mean]:
        """Return the loss and its metrics on one batch, as averages that can be added over batches.

        Modules run in evaluation mode, the key of a loss is None, and neither the state nor torch's random generators
        change. A plain number is weighted by the number of examples in the batch; a warning is issued if the first axes
        of its tensors differ.

        On many ranks (`ftrain.sharded`) every rank must call this, as `evaluate` describes.

        Raises:
            StructureError: when `state` is not a state.
        """
        require_state("eval_step", state)
        share = self.share(tree.as_tree(batch))
        state, gathering = evaluation_state(self.loss, state, "eval_step")
        with gathering or nullcontext():
            means = self.of_rank(state, share)
        return means if self.loss.ranks is None else sum_means(means, self.loss.ranks)

    @property
    def warns(self) -> bool:
        """Whether this rank issues warnings that would be the same on all ranks: only the first one does."""
        return self.loss.ranks is None or self.loss.ranks.rank == 0

    def share(self, batch: PyTree) -> Share:
        """Return the examples that this rank evaluates: its rows of a common batch, or all of its own batch."""
        ranks = self.loss.ranks
        return Share(batch, True) if ranks is None or not ranks.whole_batches else share_of(batch, ranks)

    def of_rank(self, state: TrainState, share: Share) -> dict[str, Mean]:
        """Return the averages over a share of a batch, on a state of `evaluation_state`."""
        with torch.no_grad(), self.loss.scope(False):
            means = self.compute((state.params, state.frozen, state.buffers), share.batch)
        return means if share.counts else tree.map(torch.zeros_like, means)

    @functools.cached_property
    def compute(self) -> Means:
        """`means`, or `EagerMeans` if it is None."""
        return self.means or EagerMeans(self.loss)

    def wrapped(self, wrapper: Wrapper) -> EvalStep:
        """Return this evaluation with a wrapper around it. Raises a ComposeError if it is not `compiled`."""
        if wrapper.text in self.loss.wrapper_texts:
            raise ComposeError(f"{wrapper.text}: the evaluation already has it; use one:\n{self}")
        if wrapper.step is not None and wrapper.step.wrap_evaluation is not None:
            return wrapper.step.wrap_evaluation(self)  # type: ignore[no-any-return]
        raise ComposeError(
            f"{wrapper.text}: wraps a training step, not an EvalStep; for 16 bits use ft.evaluate(..., dtype=)"
        )

    def __repr__(self) -> str:
        return f"eval    {self.loss.text}"


class EagerMeans:
    """Computes the averages of a loss operation by operation, within the scope of the loss."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self._flatten = loss, Flattener()
        # The first rank warns of a batch that all ranks read; every rank warns of a batch that it alone reads.
        self._warns = loss.ranks is None or loss.ranks.rank == 0 or not loss.ranks.whole_batches

    def __call__(self, tensors: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> dict[str, Mean]:
        """Return the averages. A model that draws random numbers in evaluation draws the same ones each time."""
        params, frozen, buffers = tensors
        text = self.loss.text
        with backends.of(tree.device_of(params)).seeded(0):
            leaves, spec = self._flatten((params, frozen, batch, buffers))
            loss, metrics, _ = run_loss(self.loss.fn, leaves, spec, rng=None, name=text)
            loss = Mean(loss.total.detach(), loss.weight.detach(), loss.plain)
            values: dict[str, Any] = {"loss": loss, **detach(metrics)}
            plain = [name for name, value in values.items() if not isinstance(value, Mean) or value.plain]
            length = _length(batch, text, plain, warns=self._warns) if plain else 1
            return {name: _mean(value, length, text, name) for name, value in values.items()}


def eval_step(loss_fn: Callable[..., Any] | Loss) -> EvalStep:
    """Return the function that evaluates a loss, which may have any form that `train_step` takes.

    Raises:
        LossError: when `loss_fn` cannot be called as a loss, or is a step.
    """
    if isinstance(getattr(loss_fn, "loss", None), Loss):
        raise LossError(f"eval_step: the loss is a {type(loss_fn).__name__}; pass its loss: eval_step(step.loss)")
    return EvalStep(adapt(loss_fn, "eval_step"))


SINGLE = str, bytes, int, float, complex, Tensor, np.generic, np.ndarray
"""Classes of leaves that are known to have no examples to count, if they have no first axis."""


def _length(batch: PyTree, text: str, plain: list[str], *, warns: bool) -> int:
    """Return the number of examples in a batch; if `warns`, warn if it is not known.

    It is the weight of the results `plain`, which are not a `Mean`, of the loss with this text.
    """
    leaves = tree.leaves(batch)
    lengths = {
        index: leaf.shape[0] for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim
    }
    if not lengths:
        unknown = dict.fromkeys(type(leaf).__name__ for leaf in leaves if not isinstance(leaf, SINGLE))
        for name in unknown if warns else ():
            warn(
                f"{text}: the number of examples in a {name} is not known; an evaluation weights each batch equally "
                f"for results that are not a Mean ({', '.join(plain)}): return ft.Mean(total, weight), or give batches "
                "of tensors in dicts, lists, tuples or registered classes"
            )
        return 1
    first, length = next(iter(lengths.items()))
    different = [index for index in lengths if lengths[index] != length]
    if different and warns:
        paths = [tree.path("batch", name) for name in tree.leaf_names(batch)]
        second = different[0]
        warn(
            f"{text}: {paths[first]} has {length} rows and {paths[second]} {lengths[second]}; an evaluation weights "
            f"results that are not a Mean ({', '.join(plain)}) by the first number: return ft.Mean(total, weight)"
        )
    return length


def _mean(metric: Any, length: int, text: str, name: str) -> Mean:
    """Return a metric as a `Mean` in a wide dtype; a plain number gets the weight `length`."""
    is_weighted = isinstance(metric, Mean) and not metric.plain
    if is_weighted:
        value = metric.total
    elif isinstance(metric, Mean):
        value = metric.value
    else:
        value = metric
    is_number = isinstance(value, Tensor | np.ndarray | np.generic | float | int)
    if is_number and not isinstance(value, Tensor):
        value = torch.as_tensor(np.asarray(value), device=tree.HOST)
    if not is_number or value.numel() != 1 or value.is_complex():
        description = f"{'a Mean of ' if isinstance(metric, Mean) else ''}{tree.describe(value)}"
        raise LossError(
            f"{text}: the metric {name!r} is {description}; an evaluation takes the mean of real numbers: 0-d "
            "tensors or Means"
        )
    if is_weighted:
        return zero_if_empty(Mean(_widened(metric.total), _widened(metric.weight)))
    value = _widened(value)
    # The mean of no examples is NaN, and its weight is 0.
    return Mean(value * length if length else torch.zeros_like(value), torch.full_like(value, length))


def _widened(value: Tensor) -> Tensor:
    return value.to(backends.widest(value.device))
