"""From a loss to its gradient: the short forms of a loss, checks of what it returns, and `value_and_grad`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor, nn

from ftrain import _torch, backends, tree
from ftrain.errors import LossError
from ftrain.step import purity
from ftrain.step.reentrant_checkpoint import REMEDY, Within
from ftrain.tree.fast_flatten import Flattener
from ftrain.types import (
    GradFn,
    Gradients,
    Loss,
    LossFn,
    LossOutput,
    Mean,
    Metrics,
    PyTree,
    TrainState,
    counted,
    replace,
)

Around: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
FORMS = "a 0-d tensor or Mean, alone or as (loss, metrics) or (loss, metrics, buffers)"


def adapt(loss_fn: Callable[..., Any] | Loss, function: str = "train_step") -> Loss:
    """Bring a loss into its full form.

    Args:
        loss_fn: ``loss_fn(params, batch)``, which may also take ``rng=`` (a key of `ftrain.random`) and
            ``buffers=`` by keyword, and returns a 0-d tensor or `Mean`, alone or as ``(loss, metrics)``
            or ``(loss, metrics, buffers)``. A 0-d tensor counts as a mean with weight one.
        function: who asks, for messages.

    Raises:
        LossError: when `loss_fn` cannot be called like that.
    """
    if isinstance(loss_fn, Loss):
        return loss_fn
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    name = "loss" if name == "<lambda>" else name
    accepted = _accepted(loss_fn, name, function)

    def full(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        offered = {"rng": rng, "buffers": buffers}
        return normalise(loss_fn(params, batch, **{key: offered[key] for key in accepted}), buffers, name)

    return Loss(full, name, needs_rng="rng" in accepted)


def _accepted(loss_fn: Callable[..., Any], name: str, function: str) -> list[str]:
    """Which of `rng` and `buffers` a loss takes."""
    if not callable(loss_fn):
        raise LossError(f"{function}: the loss must be a function (params, batch) -> loss, found {loss_fn!r}")
    if isinstance(loss_fn, nn.Module):
        raise LossError(
            f"{function}: the loss is the module {type(loss_fn).__name__}; make one of it with "
            "ft.from_module(module, criterion)"
        )
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # builtins
        return []
    try:
        signature.bind("params", "batch", **{key: None for key in ("rng", "buffers") if key in signature.parameters})
    except TypeError as error:
        raise LossError(f"{function}: {name}{signature} cannot be called as {name}(params, batch): {error}") from error
    return [key for key in ("rng", "buffers") if key in signature.parameters]


def normalise(returned: Any, buffers: PyTree, name: str) -> LossOutput:
    """Bring what a loss returned into the form (Mean, metrics, buffers).

    Raises:
        LossError: when it is none of the forms that `adapt` lists.
    """
    loss, metrics, new_buffers = returned, {}, buffers
    if isinstance(returned, tuple):
        if len(returned) not in (2, 3):
            raise LossError(f"{name}: returned a tuple of {len(returned)}; needs {FORMS}")
        loss, metrics, new_buffers = (*returned, buffers)[:3]
    if not isinstance(metrics, dict):
        raise LossError(f"{name}: metrics must be a dict of tensors or Means, found {type(metrics).__name__}")
    if "loss" in metrics:
        raise LossError(f"{name}: a metric is called 'loss', which is the name of the loss itself; rename it")
    if isinstance(loss, Tensor) and loss.ndim == 0:
        loss = Mean(
            loss, torch.ones((), dtype=torch.promote_types(loss.dtype, torch.float32), device=loss.device), plain=True
        )
    if not isinstance(loss, Mean):
        raise LossError(f"{name}: returned {tree.describe(loss)}; needs {FORMS}")
    for part in (loss.total, loss.weight):
        if not isinstance(part, Tensor) or part.ndim:
            raise LossError(f"{name}: total and weight of a Mean must be 0-d tensors, found {tree.describe(part)}")
    return loss, metrics, new_buffers


def report(metrics: Metrics, function: str, **more: Any) -> Metrics:
    """Add metrics to those that a loss reports.

    Raises:
        LossError: when one of that name is there already.
    """
    for name in more:
        if name in metrics:
            raise LossError(f"{function}: a metric is called {name!r}, which the step reports itself; rename it")
    return {**metrics, **more}


def value_and_grad(
    loss: LossFn,
    *,
    name: str = "loss",
    allow_unused: bool = False,
    scale: Callable[[TrainState], Tensor] | None = None,
    watch: bool = False,
    late: bool = False,
) -> GradFn:
    """Return the function that computes the gradient of a mean loss with respect to ``state.params``.

    Args:
        loss: a loss in its full form.
        name: what to call it in messages.
        allow_unused: give parameters that the loss does not use a zero gradient instead of an error.
        scale: ``state -> 0-d tensor``, the cotangent of the mean loss; divided out again. Keeps small
            float16 gradients from vanishing (Micikevicius et al. 2018, arXiv:1710.03740).
        watch: also report whether loss and gradients are finite.
        late: leave the backward pass to `Gradients.pull`; excludes `scale` and `watch`.

    Raises:
        LossError: from the returned function (or when gradients are pulled), when the loss changes its inputs in
            place, does not depend on the parameters, or leaves some of them unused.
    """
    forward = _Forward(loss, name)
    if late:
        return _late(forward, name, allow_unused)
    return ValueAndGrad(forward, name, allow_unused, scale, watch)


@dataclass(frozen=True)
class Ran:
    """What a forward pass leaves.

    Args:
        params: leaves that are differentiated.
        spec: their structure.
        total: of the loss, with its graph; what follows has none.
        loss: the loss.
        metrics: what else it reported.
        buffers: after it.
        later: adds to the metrics what is known after the backward pass.
        hidden: ``indices of unused leaves -> those of them that a re-entrant checkpoint hides from the gradient``.
    """

    params: list[Tensor]
    spec: optree.PyTreeSpec
    total: Tensor
    loss: Mean
    metrics: Metrics
    buffers: PyTree
    later: Callable[[Metrics], Metrics] = lambda metrics: metrics
    hidden: Callable[[list[int]], list[int]] = lambda unused: []

    def cotangent(self, factor: Tensor | None) -> Tensor:
        """The gradient of the mean, or of a multiple of it, with respect to its total."""
        weight = self.loss.weight
        if self.loss.plain:
            return weight.to(self.total.dtype) if factor is None else factor
        # A loss without weight has no gradient: 0, where 1 / 0 would put NaN into the parameters.
        cotangent = torch.where(weight == 0, 0.0, 1.0 / weight).to(self.total.dtype)
        return cotangent if factor is None else cotangent * factor


class _Forward:
    """Runs a loss on leaves of its own, or on those of an earlier run."""

    def __init__(self, loss: LossFn, name: str) -> None:
        self._loss, self._flatten, self._name = loss, Flattener(), name
        self._unused: set[tuple[int, ...]] = set()

    def __call__(self, state: TrainState, batch: PyTree, rng: Tensor | None, params: list[Tensor] | None = None) -> Ran:
        leaves, spec = self._flatten((state.params, state.frozen, batch, state.buffers))
        params_spec = spec.child(0)
        # A graph that is being captured must not hold a second run.
        within = Within() if _torch.is_capturing() else None
        with torch.enable_grad(), within or nullcontext():
            if params is None:
                params = [leaf.detach().requires_grad_() for leaf in leaves[: params_spec.num_leaves]]
            leaves[: len(params)] = params
            mean, metrics, buffers = purity.call(self._loss, leaves, spec, rng=rng, name=self._name)
        _require_differentiable(mean, self._name)
        # A count of tokens, or a narrower float, must not make the gradient coarser than the loss is.
        loss = Mean(mean.total.detach(), mean.weight, mean.plain)
        if not mean.plain:
            weight = mean.weight.detach().to(torch.promote_types(mean.total.dtype, torch.float32))
            loss = counted(replace(loss, weight=weight))
        hidden = partial(self._hidden, (state, batch, rng, params), within)
        metrics = {name: counted(each) if isinstance(each, Mean) else each for name, each in detach(metrics).items()}
        return Ran(params, params_spec, mean.total, loss, metrics, detach(buffers), hidden=hidden)

    def _hidden(self, inputs: Any, within: Within | None, unused: list[int]) -> list[int]:
        """Look for unused leaves in re-entrant checkpoints, with a run of its own, once for the same leaves."""
        is_abstract = within is None and _torch.is_fake(inputs[-1][0])
        if is_abstract or tuple(unused) in self._unused:
            return []
        if within is None:
            with warnings.catch_warnings(), backends.of(inputs[-1][0].device).seeded(0), Within() as within:
                warnings.simplefilter("ignore")
                self(*inputs)
        hidden = [index for index in unused if id(inputs[-1][index]) in within.ids]
        if not hidden:
            self._unused.add(tuple(unused))
        return hidden


@dataclass(frozen=True)
class ValueAndGrad:
    """The gradient of a mean loss, as `value_and_grad` describes it; a `GradFn` whose parts are open.

    Args:
        forward: ``(state, batch, rng) -> Ran``, or with the leaves of an earlier run behind.
        name: what to call the loss in messages.
        allow_unused: give parameters that the loss does not use a zero gradient.
        scale: ``state -> 0-d tensor``, by which the loss is multiplied while gradients are computed.
        watch: also report whether loss and gradients are finite.
    """

    forward: Callable[..., Ran]
    name: str
    allow_unused: bool
    scale: Callable[[TrainState], Tensor] | None
    watch: bool

    def __call__(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        """Return the gradient for a batch."""
        ran = self.forward(state, batch, rng)
        factor = self.factor(state, ran)
        grads = self.backward(state, ran, ran.cotangent(factor))
        finite = _finite(ran.loss.total, grads) if self.watch else None
        if factor is not None:
            grads = tree.scale_leaves(grads, 1.0 / factor)
        return Gradients(tree.unflatten(ran.spec, grads), ran.loss, ran.later(ran.metrics), ran.buffers, finite)

    def factor(self, state: TrainState, ran: Ran) -> Tensor | None:
        """By what the loss is multiplied while gradients are computed."""
        return self.scale(state).to(ran.total.dtype) if self.scale else None

    def backward(self, state: TrainState, ran: Ran, cotangent: Tensor) -> list[Tensor]:
        """Return the gradient of each leaf."""
        found = run_backward(ran, cotangent)
        return _filled(found, ran, state.params, self.name, self.allow_unused)

    def around_forward(self, transform: Around) -> ValueAndGrad:
        """Return it with its forward pass wrapped."""
        return replace(self, forward=transform(self.forward))


def around_forward(grad: GradFn, transform: Around) -> GradFn:
    """Wrap the forward pass of a gradient, which stays open then; where it is closed, all of it."""
    around: Callable[[Around], GradFn] | None = getattr(grad, "around_forward", None)
    return transform(grad) if around is None else around(transform)


def run_backward(ran: Ran, cotangent: Tensor, *, add: bool = False) -> tuple[Tensor | None, ...]:
    """Run the backward pass; with `add`, it adds to the gradients that the leaves have.

    Raises:
        LossError: when it passes through a re-entrant `torch.utils.checkpoint`.
    """
    try:
        return _torch.run_backward(ran.total, cotangent, ran.params, add=add)
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise LossError(
            "the loss uses torch.utils.checkpoint(use_reentrant=True), through which no gradient with respect to given "
            f"parameters can be taken; use {REMEDY}"
        ) from error


def _late(forward: _Forward, name: str, allow_unused: bool) -> GradFn:
    def grad(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        ran = forward(state, batch, rng)
        pull = _puller(ran, state.params, name, allow_unused)
        return Gradients(None, ran.loss, ran.metrics, ran.buffers, pull=pull)

    return grad


def detach(values: PyTree) -> PyTree:
    """Cut every tensor off the graph that computed it."""
    if tree.is_blank(values):
        return values
    return tree.map(lambda leaf: leaf.detach() if tree.is_tensor(leaf) else leaf, values)


def _require_differentiable(mean: Mean, name: str) -> None:
    if not mean.total.is_floating_point():
        raise LossError(f"{name}: the loss is {tree.describe(mean.total)}; needs a floating-point tensor")
    if not mean.total.requires_grad:
        raise LossError(
            f"{name}: the loss does not depend on the parameters (it has no grad_fn); look for .detach(), "
            ".item(), torch.no_grad(), torch.utils.checkpoint with use_reentrant=True, or a computation that does not "
            "read its first argument"
        )
    if mean.weight.requires_grad:
        raise LossError(f"{name}: the weight of the Mean depends on the parameters; detach it")


def _puller(ran: Ran, params: PyTree, name: str, allow_unused: bool) -> Callable[[Callable[[int, Tensor], None]], None]:
    leaves = ran.params

    def pull(take: Callable[[int, Tensor], None]) -> None:
        def taking(index: int, grad: Tensor | None) -> Tensor | None:
            if grad is None:  # So says a function of its own kind that has none to give.
                return None
            if grad.is_sparse:
                raise _sparse(params, index, name)
            take(index, grad)
            # What the engine keeps in its place is a single number.
            return grad.new_zeros(()).expand_as(grad)

        handles = [
            leaf.register_hook(partial(taking, index))  # type: ignore[no-untyped-call]
            for index, leaf in enumerate(leaves)
        ]
        try:
            found = run_backward(ran, ran.cotangent(None))
        finally:
            for handle in handles:
                handle.remove()
        for index, (given, grad) in enumerate(zip(found, _filled(found, ran, params, name, allow_unused), strict=True)):
            if given is None:
                take(index, grad)

    return pull


def _filled(grads: tuple[Tensor | None, ...], ran: Ran, params: PyTree, name: str, allow_unused: bool) -> list[Tensor]:
    """Give parameters that the loss does not use a zero gradient, if that is allowed."""
    used = [grad for grad in grads if grad is not None]
    if any(grad.is_sparse for grad in used):
        raise _sparse(params, next(i for i, grad in enumerate(grads) if grad is not None and grad.is_sparse), name)
    if len(used) == len(grads):
        return used
    unused = [index for index, grad in enumerate(grads) if grad is None]
    if hidden := ran.hidden(unused):
        raise LossError(
            f"{name}: {len(hidden)} parameters are used only within torch.utils.checkpoint(use_reentrant=True), which "
            f"gives them no gradient: {_listed(params, hidden)}; use {REMEDY}"
        )
    if not allow_unused:
        raise LossError(
            f"{name}: the loss does not use {len(unused)} of {len(grads)} parameters: {_listed(params, unused)}; use "
            "them, freeze them with trainable=, or allow it with train_step(..., allow_unused=True)"
        )
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(ran.params, grads, strict=True)]


def _listed(params: PyTree, indices: list[int]) -> str:
    names = tree.leaf_names(params)
    return ", ".join(names[i] for i in indices[: tree.MAX_LISTED]) + ", ..." * (len(indices) > tree.MAX_LISTED)


def _sparse(params: PyTree, index: int, name: str) -> LossError:
    return LossError(
        f"{name}: the gradient of {tree.path('params', tree.leaf_names(params)[index])} is sparse, and optimizers here "
        "need a dense one; leave out sparse=True of the embedding"
    )


def _finite(total: Tensor, grads: list[Tensor]) -> Tensor:
    return torch.isfinite(total) & tree.all_finite(grads)
