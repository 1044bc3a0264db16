"""The gradient of a loss: `value_and_grad`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor, nn

from ftrain import _torch, backends, tree
from ftrain.errors import LossError
from ftrain.step import purity
from ftrain.step.combined_grads import CombinedGrads, announce, announced
from ftrain.step.outside_params import check_outside_params
from ftrain.step.reentrant_checkpoint import REMEDY, CheckpointInputs
from ftrain.step.unused_params import listed, refuse_unused, watching
from ftrain.tree.fast_flatten import Flattener
from ftrain.types import (
    GradFn,
    Gradients,
    LossFn,
    Mean,
    Metrics,
    PyTree,
    TrainState,
    replace,
    zero_if_empty,
)

Around: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

_is_sparse = attrgetter("is_sparse")


def value_and_grad(
    loss: LossFn,
    *,
    name: str = "loss",
    allow_unused: bool = False,
    scale: Callable[[TrainState], Tensor] | None = None,
    watch: bool = False,
    late: bool = False,
    module_params: Mapping[str, nn.Parameter] | None = None,
) -> GradFn:
    """Return the function that computes the gradient of a mean loss with respect to ``state.params``.

    Args:
        loss: a loss in its full form.
        name: the name of the loss in error messages.
        allow_unused: give parameters that the loss does not use a zero gradient instead of an error.
        scale: ``state -> 0-d tensor``, a factor of the loss during the backward pass; the gradients are divided by it
            afterwards. Keeps small float16 gradients from underflowing (Micikevicius et al. 2018, arXiv:1710.03740).
        watch: also report whether loss and gradients are finite.
        late: do not run the backward pass, which `Gradients.stream_grads` then does; excludes `scale` and `watch`.
        module_params: the parameters of the module of the loss, as they are outside of a step.

    Raises:
        LossError: from the returned function (or from `Gradients.stream_grads`), when the loss changes its inputs in
            place, does not depend on the parameters, leaves some of them unused, or uses those of its module from
            elsewhere.
    """
    forward = _Forward(loss, name, module_params or {})
    if late:
        return StreamingGrad(forward, name, allow_unused)
    return ValueAndGrad(forward, name, allow_unused, scale, watch)


@dataclass(eq=False)
class ForwardResult:
    """The result of a forward pass, not to be changed; it is not frozen, which takes three times as long to make.

    Args:
        params: the leaves of the parameters that are differentiated.
        spec: their tree structure.
        total: total of the loss, a 0-d tensor with its graph; all other fields are detached.
        loss: the loss.
        metrics: the metrics that the loss reported.
        buffers: the buffers after the forward pass.
        later: adds metrics that are known only after the backward pass.
        hidden: ``indices of unused leaves -> indices``, those that a re-entrant checkpoint hides from the gradient.
        combined: what runs the backward pass where gradients are combined with those of other ranks meanwhile.
    """

    params: list[Tensor]
    spec: optree.PyTreeSpec
    total: Tensor
    loss: Mean
    metrics: Metrics
    buffers: PyTree
    later: Callable[[Metrics], Metrics] = dict
    hidden: Callable[[list[int]], list[int]] = lambda unused: []
    combined: CombinedGrads | None = None

    def cotangent(self, factor: Tensor | None) -> Tensor:
        """Return the gradient of the mean loss, times `factor`, with respect to `total`."""
        weight = self.loss.weight
        if self.loss.plain:
            return weight.to(self.total.dtype) if factor is None else factor
        # With a weight of 0 the gradient is 0: 1 / 0 would write NaN into the parameters.
        cotangent = torch.where(weight == 0, 0.0, 1.0 / weight).to(self.total.dtype)
        return cotangent if factor is None else cotangent * factor


class _Forward:
    """Runs a loss on new detached leaves, or on the leaves of an earlier run."""

    def __init__(self, loss: LossFn, name: str, module_params: Mapping[str, nn.Parameter]) -> None:
        self._loss, self._flatten, self._name, self._module_params = loss, Flattener(), name, module_params
        self._unused: set[tuple[int, ...]] = set()
        self._is_checked = False
        # The last structure of what a loss reads, and that of its parameters.
        self._specs: tuple[Any, Any] = None, None

    def __call__(
        self, state: TrainState, batch: PyTree, rng: Tensor | None, params: list[Tensor] | None = None
    ) -> ForwardResult:
        if not _torch.is_capturing():
            return self._run(state, batch, rng, params, None)
        # Unused leaves of a graph cannot be looked for in a second run (`_hidden`), so watch the one that is captured.
        with CheckpointInputs() as inputs:
            return self._run(state, batch, rng, params, inputs)

    def _run(
        self,
        state: TrainState,
        batch: PyTree,
        rng: Tensor | None,
        params: list[Tensor] | None,
        inputs: CheckpointInputs | None,
    ) -> ForwardResult:
        leaves, spec = self._flatten((state.params, state.frozen, batch, state.buffers))
        last_spec, params_spec = self._specs
        if last_spec is not spec:
            params_spec = spec.child(0)
            self._specs = spec, params_spec
        with torch.set_grad_enabled(True):
            if params is None:
                params = [*map(Tensor.requires_grad_, map(Tensor.detach, leaves[: params_spec.num_leaves]))]
            leaves[: len(params)] = params
            mean, metrics, buffers = purity.call(self._loss, leaves, spec, rng=rng, name=self._name)
        _require_differentiable(mean, self._name)
        if not self._is_checked:
            check_outside_params(mean.total, self._module_params, self._name)
            self._is_checked = True
        # An integer count of tokens, or a narrower float, must not lower the precision of the gradient.
        loss = Mean(mean.total.detach(), mean.weight, mean.plain)
        if not mean.plain:
            weight = mean.weight.detach().to(torch.promote_types(mean.total.dtype, torch.float32))
            loss = zero_if_empty(replace(loss, weight=weight))
        hidden = partial(self._hidden, (state, batch, rng, params), inputs)
        if metrics:
            metrics = {name: zero_if_empty(m) if isinstance(m, Mean) else m for name, m in detach(metrics).items()}
        combined = announced()
        if combined is not None:
            announce(None)
        return ForwardResult(
            params, params_spec, mean.total, loss, metrics, detach(buffers), hidden=hidden, combined=combined
        )

    def _hidden(self, arguments: Any, inputs: CheckpointInputs | None, unused: list[int]) -> list[int]:
        """Return the unused leaves that a re-entrant checkpoint uses; runs the loss once more for each new set."""
        params = arguments[-1]
        is_abstract = inputs is None and _torch.is_fake(params[0])
        if is_abstract or tuple(unused) in self._unused:
            return []
        if inputs is None:
            with warnings.catch_warnings(), backends.of(params[0].device).seeded(0), CheckpointInputs() as inputs:
                warnings.simplefilter("ignore")
                self(*arguments)
        hidden = [index for index in unused if id(params[index]) in inputs.ids]
        if not hidden:
            self._unused.add(tuple(unused))
        return hidden


def _require_differentiable(mean: Mean, name: str) -> None:
    """Check that a loss is a floating-point number that depends on the parameters, and that its weight does not."""
    if not mean.total.is_floating_point():
        raise LossError(f"{name}: the loss is {tree.describe(mean.total)}; needs a floating-point tensor")
    if not mean.total.requires_grad:
        raise LossError(
            f"{name}: the loss does not depend on the parameters (it has no grad_fn); look for .detach(), "
            ".item(), torch.no_grad(), torch.inference_mode(), torch.utils.checkpoint with use_reentrant=True, or a "
            "computation that does not read its first argument"
        )
    if mean.weight.requires_grad:
        raise LossError(f"{name}: the weight of the Mean depends on the parameters; detach it")


@dataclass(frozen=True)
class ValueAndGrad:
    """The gradient of a mean loss (`value_and_grad`), with forward and backward pass as separate functions.

    Args:
        forward: ``(state, batch, rng) -> ForwardResult``; a fourth argument gives the leaves of an earlier run.
        name: the name of the loss in error messages.
        allow_unused: give parameters that the loss does not use a zero gradient.
        scale: ``state -> 0-d tensor``, a factor of the loss during the backward pass.
        watch: also report whether loss and gradients are finite.
    """

    forward: Callable[..., ForwardResult]
    name: str
    allow_unused: bool
    scale: Callable[[TrainState], Tensor] | None
    watch: bool

    def __call__(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        """Return the gradient of the loss of a batch."""
        result = self.forward(state, batch, rng)
        factor = self.factor(state, result) if self.scale else None
        grads = self.backward(state, result, result.cotangent(factor))
        finite = _finite(result.loss.total, grads) if self.watch else None
        if factor is not None:
            grads = tree.scale_leaves(grads, 1.0 / factor)
        metrics = result.later(result.metrics)
        return Gradients(result.spec.unflatten(grads), result.loss, metrics, result.buffers, finite)

    def factor(self, state: TrainState, result: ForwardResult) -> Tensor | None:
        """Return the factor of the loss during the backward pass, or None."""
        return self.scale(state).to(result.total.dtype) if self.scale else None

    def backward(self, state: TrainState, result: ForwardResult, cotangent: Tensor) -> list[Tensor]:
        """Return the gradient of each leaf."""
        grads = run_backward(result, cotangent)
        return _filled(grads, result, state.params, self.name, self.allow_unused)

    def around_forward(self, transform: Around) -> ValueAndGrad:
        """Return a copy with a wrapped forward pass."""
        return replace(self, forward=transform(self.forward))


def around_forward(grad: GradFn, transform: Around) -> GradFn:
    """Wrap the forward pass of a gradient function, or all of it where it has no separate forward pass."""
    around: Callable[[Around], GradFn] | None = getattr(grad, "around_forward", None)
    return transform(grad) if around is None else around(transform)


def run_backward(result: ForwardResult, cotangent: Tensor, *, add: bool = False) -> tuple[Tensor | None, ...]:
    """Run the backward pass; with `add`, add the gradients to the `.grad` of the leaves.

    Raises:
        LossError: when the loss uses a re-entrant `torch.utils.checkpoint`.
    """
    try:
        if result.combined is None:
            return _torch.run_backward(result.total, cotangent, result.params, add=add)
        grads = result.combined.backward(partial(_torch.run_backward, result.total, cotangent))
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise LossError(
            "the loss uses torch.utils.checkpoint(use_reentrant=True), through which no gradient with respect to given "
            f"parameters can be taken; use {REMEDY}"
        ) from error
    if not add:
        return tuple(grads)
    for param, grad in zip(result.params, grads, strict=True):
        param.grad += grad  # type: ignore[operator]
    return ()


@dataclass(frozen=True)
class StreamingGrad:
    """As `ValueAndGrad`, with a backward pass that runs later, by `Gradients.stream_grads`."""

    forward: Callable[..., ForwardResult]
    name: str
    allow_unused: bool

    def __call__(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        """Return the results of the forward pass, and what runs the backward pass."""
        result = self.forward(state, batch, rng)
        stream = _stream(result, state.params, self.name, self.allow_unused)
        return Gradients(None, result.loss, result.metrics, result.buffers, stream_grads=stream)


def detach(values: PyTree) -> PyTree:
    """Detach every tensor of a tree from its graph."""
    if values is None or values == {}:
        return values
    return tree.map(lambda leaf: leaf.detach() if tree.is_tensor(leaf) else leaf, values)


def _stream(
    result: ForwardResult, params: PyTree, name: str, allow_unused: bool
) -> Callable[[Callable[[int, Tensor], None]], None]:
    leaves = result.params

    def stream(take: Callable[[int, Tensor], None]) -> None:
        def take_one(index: int, grad: Tensor | None) -> Tensor | None:
            if grad is None:  # From a custom autograd.Function that returns None.
                return None
            if grad.is_sparse:
                raise _sparse(params, index, name)
            take(index, grad)
            # The engine keeps the returned tensor: an expanded single number takes no memory.
            return grad.new_zeros(()).expand_as(grad)

        handles = [
            leaf.register_hook(partial(take_one, index))  # type: ignore[no-untyped-call]
            for index, leaf in enumerate(leaves)
        ]
        try:
            grads = run_backward(result, result.cotangent(None))
        finally:
            for handle in handles:
                handle.remove()
        filled = _filled(grads, result, params, name, allow_unused)
        for index, (grad, filled_grad) in enumerate(zip(grads, filled, strict=True)):
            # Those that were combined with other ranks' have passed no hook of a leaf.
            if grad is None or result.combined is not None:
                take(index, filled_grad)

    return stream


def _filled(
    grads: tuple[Tensor | None, ...], result: ForwardResult, params: PyTree, name: str, allow_unused: bool
) -> list[Tensor]:
    """Return the gradients with zeros for unused parameters, if these are allowed."""
    on_rank = watching()
    irregular = [] if _are_dense(grads) else [i for i, grad in enumerate(grads) if grad is None or grad.is_sparse]
    if on_rank is not None:
        on_rank.note_call([index for index in irregular if grads[index] is None], name, allow_unused)
    if not irregular:
        return list(grads)  # type: ignore[arg-type]
    unused = [index for index in irregular if grads[index] is None]
    if len(unused) < len(irregular):
        raise _sparse(params, next(index for index in irregular if index not in unused), name)
    # On one of many ranks the loss must not run again alone, and others may use what it does not.
    if on_rank is None and (hidden := result.hidden(unused)):
        raise LossError(
            f"{name}: {len(hidden)} parameters are used only within torch.utils.checkpoint(use_reentrant=True), which "
            f"gives them no gradient: {listed(params, hidden)}; use {REMEDY}"
        )
    if on_rank is None and not allow_unused:
        refuse_unused(name, params, unused)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(result.params, grads, strict=True)]


def _are_dense(grads: tuple[Tensor | None, ...]) -> bool:
    # Without a Python loop over the leaves, which every step would make.
    return type(None) not in map(type, grads) and not any(map(_is_sparse, grads))


def _sparse(params: PyTree, index: int, name: str) -> LossError:
    return LossError(
        f"{name}: the gradient of {tree.path('params', tree.leaf_names(params)[index])} is sparse; optimizers need a "
        "dense one: leave out sparse=True of the embedding"
    )


def _finite(total: Tensor, grads: list[Tensor]) -> Tensor:
    return torch.isfinite(total) & tree.all_finite(grads)
