"""The gradient of a loss: a forward pass (`ftrain.step.forward`) and a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import LossError, add_note, listed
from ftrain.step.forward import ForwardResult
from ftrain.step.rank_backward import unused_on_rank
from ftrain.step.reentrant_checkpoint import REMEDY
from ftrain.types import GradFn, Gradients, PyTree, TrainState, replace

Around: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

_is_sparse = attrgetter("is_sparse")


@dataclass(frozen=True)
class _OfLoss:
    """The common base of the gradient functions of a loss.

    Args:
        forward: ``(state, batch, rng) -> ForwardResult``; a fourth argument are the leaves of an earlier run.
        name: the name of the loss in error messages.
        allow_unused: give parameters that the loss does not use a zero gradient instead of an error.
    """

    forward: Callable[..., ForwardResult]
    name: str
    allow_unused: bool = False

    def filled(self, state: TrainState, result: ForwardResult, grads: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Return the gradients, with zeros for unused parameters if these are allowed."""
        on_rank = unused_on_rank()
        # `map` avoids a Python loop over the leaves in every step.
        are_dense = type(None) not in map(type, grads) and not any(map(_is_sparse, grads))
        irregular = [] if are_dense else [i for i, grad in enumerate(grads) if grad is None or grad.is_sparse]
        if on_rank is not None:
            on_rank.note_call([index for index in irregular if grads[index] is None], self.name, self.allow_unused)
        if not irregular:
            return list(grads)  # type: ignore[arg-type]
        params = state.params
        unused = [index for index in irregular if grads[index] is None]
        sparse = [index for index in irregular if grads[index] is not None]
        if sparse:
            refuse_sparse(self.name, tree.leaf_names(params)[sparse[0]])
        # Not on many ranks: a rank must not run the loss again alone, and other ranks may use the parameters.
        if on_rank is None and (hidden := result.hidden(unused)):
            raise LossError(
                f"{self.name}: {len(hidden)} parameters are used only within "
                "torch.utils.checkpoint(use_reentrant=True), which gives them no gradient: "
                f"{_listed(params, hidden)}; use {REMEDY}"
            )
        if on_rank is None and not self.allow_unused:
            refuse_unused(self.name, params, unused)
        pairs = zip(result.params, grads, strict=True)
        return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]


@dataclass(frozen=True)
class ValueAndGrad(_OfLoss):
    """The function that computes the gradient of a mean loss with respect to ``state.params``.

    Args:
        scale: ``state -> 0-d tensor``, a factor of the loss during the backward pass; the gradients are divided by it
            afterwards. Keeps small float16 gradients from underflowing (Micikevicius et al. 2018, arXiv:1710.03740).
        reports_finite: also report whether loss and gradients are finite.

    Raises:
        LossError: when it is called, if the loss changes its inputs in place, does not depend on the parameters, does
            not use some of them, or uses parameters of its module that are not in the state.
    """

    scale: Callable[[TrainState], Tensor] | None = None
    reports_finite: bool = False

    def __call__(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        """Return the gradient of the loss of a batch."""
        result = self.forward(state, batch, rng)
        factor = self.factor(state, result) if self.scale else None
        grads = self.filled(state, result, run_backward(result, result.cotangent(factor)))
        finite = torch.isfinite(result.loss.total) & tree.all_finite(grads) if self.reports_finite else None
        if factor is not None:
            tree.scale_in_turn(grads, 1.0 / factor)
        metrics = result.finish_metrics(result.metrics)
        return Gradients(result.spec.unflatten(grads), result.loss, metrics, result.buffers, finite)

    def factor(self, state: TrainState, result: ForwardResult) -> Tensor | None:
        """Return the factor of the loss during the backward pass, or None."""
        return self.scale(state).to(result.total.dtype) if self.scale else None

    def around_forward(self, transform: Around) -> ValueAndGrad:
        """Return a copy with a wrapped forward pass."""
        return replace(self, forward=transform(self.forward))


def around_forward(grad: GradFn, transform: Around) -> GradFn:
    """Return a gradient function with a wrapped forward pass; the whole function is wrapped if it has none."""
    around: Callable[[Around], GradFn] | None = getattr(grad, "around_forward", None)
    return transform(grad) if around is None else around(transform)


def run_backward(result: ForwardResult, cotangent: Tensor, *, add: bool = False) -> tuple[Tensor | None, ...]:
    """Run the backward pass; with `add`, add the gradients to the `.grad` of the leaves.

    Raises a LossError if the loss uses a re-entrant `torch.utils.checkpoint`.
    """
    try:
        if result.combined is None:
            return _torch.run_backward(result.total, cotangent, result.params, add=add)
        grads = result.combined.backward(partial(_torch.run_backward, result.total, cotangent))
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            add_note(
                error,
                "the loss called .backward(), which the step does itself; or it used a tensor with the graph of an "
                "earlier call, as of a hidden state: call .detach() on what it keeps",
            )
        if "use_reentrant=True" not in str(error):
            raise
        raise LossError(
            "the loss uses torch.utils.checkpoint(use_reentrant=True), which does not support the gradient with "
            f"respect to the parameters of a state; use {REMEDY}"
        ) from error
    if not add:
        return tuple(grads)
    for param, grad in zip(result.params, grads, strict=True):
        if grad is not None:
            param.grad = grad if param.grad is None else param.grad.add_(grad)
    return ()


@dataclass(frozen=True)
class StreamingGrad(_OfLoss):
    """As `ValueAndGrad`, with a backward pass that `Gradients.stream_grads` runs."""

    def __call__(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        """Return the results of the forward pass, and the function that runs the backward pass."""
        result = self.forward(state, batch, rng)
        stream = partial(self._stream, result, state)
        return Gradients(None, result.loss, result.metrics, result.buffers, stream_grads=stream)

    def _stream(self, result: ForwardResult, state: TrainState, take: Callable[[int, Tensor], None]) -> None:
        if result.combined is not None:  # Combined gradients are known only at the end, not leaf by leaf.
            grads = run_backward(result, result.cotangent(None))
            for index, grad in enumerate(self.filled(state, result, grads)):
                take(index, grad)
            return
        leaves = result.params
        placeholders: list[Tensor | None] = [None] * len(leaves)

        def take_one(index: int, leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            if grad is None:
                return
            if grad.is_sparse:
                refuse_sparse(self.name, tree.leaf_names(state.params)[index])
            if placeholders[index] is not None:
                name = tree.leaf_names(state.params)[index]
                raise LossError(
                    f"{self.name}: the gradient of {tree.path('params', name)} comes in several parts, because the "
                    "loss calls torch.autograd.backward within its backward pass (reversible layers, a checkpoint of "
                    "its own); leave out update_in_backward"
                )
            take(index, grad)
            # A tensor that is expanded from a single number takes no memory.
            placeholders[index] = grad.new_zeros(()).expand_as(grad)

        # Unlike `register_hook`, not called by a `torch.autograd.grad` within the backward pass of a custom Function.
        handles = [
            leaf.register_post_accumulate_grad_hook(partial(take_one, index))  # type: ignore[no-untyped-call]
            for index, leaf in enumerate(leaves)
        ]
        try:
            for leaf in leaves:
                leaf.grad = None
            run_backward(result, result.cotangent(None), add=True)
        finally:
            for handle in handles:
                handle.remove()
        filled = self.filled(state, result, tuple(placeholders))
        for index, placeholder in enumerate(placeholders):
            if placeholder is None:
                take(index, filled[index])


def refuse_sparse(where: str, name: str) -> NoReturn:
    """Raises a LossError for a parameter of this name, whose gradient is sparse."""
    raise LossError(
        f"{where}: the gradient of {tree.path('params', name)} is sparse; optimizers need a dense one: leave out "
        "sparse=True of the embedding"
    )


def refuse_unused(loss: str, params: PyTree, indices: Sequence[int]) -> NoReturn:
    """Raises a LossError for the parameters of these indices, which a loss does not use."""
    count = len(tree.leaves(params))
    raise LossError(
        f"{loss}: the loss does not use {len(indices)} of {count} parameters: {_listed(params, indices)}; use "
        "them, freeze them with trainable=, or give them a gradient of 0 with train_step(..., allow_unused=True), with "
        "which weight decay and momentum still change them"
    )


def _listed(params: PyTree, indices: Sequence[int]) -> str:
    names = tree.leaf_names(params)
    return listed([names[index] for index in indices])
