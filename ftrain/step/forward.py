"""The forward pass: run a loss on new leaves, and check that it is a pure function of its inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor, nn

from ftrain import _torch, backends, tree
from ftrain.checkpoint.layout import as_bytes
from ftrain.errors import LossError, TraceError, add_note
from ftrain.step.batch_notes import batch_notes
from ftrain.step.loss_forms import zero_if_empty
from ftrain.step.outside_params import OutsideParams
from ftrain.step.rank_backward import CombinedGrads, announce, announced
from ftrain.step.reentrant_checkpoint import CheckpointInputs
from ftrain.tree.fast_flatten import Flattener
from ftrain.types import NAMESPACE, LossFn, LossOutput, Mean, Metrics, PyTree, TrainState, replace

LEAF_WRITTEN = "a leaf Variable that requires grad"
"""Part of torch's error when a leaf that requires a gradient is written in place."""

COMPARED = 1024
"""Number of elements of each input that are compared after the first run."""

INPUTS = "params", "frozen", "batch", "buffers"
"""The inputs of a loss, in the order in which `run_loss` gets them."""


@dataclass(eq=False)
class ForwardResult:
    """The result of a forward pass. Do not change it; it is not frozen because that takes three times as long to make.

    Args:
        params: the leaves of the parameters that are differentiated, with the structure `spec`.
        total: total of the loss, a 0-d tensor with its graph; all other fields are detached.
        finish_metrics: adds metrics that are known only after the backward pass.
        hidden: ``indices of unused leaves -> indices``, those that a re-entrant checkpoint hides from autograd.
        combined: runs the backward pass if it also combines the gradients with those of other ranks; else None.
    """

    params: list[Tensor]
    spec: optree.PyTreeSpec
    total: Tensor
    loss: Mean
    metrics: Metrics
    buffers: PyTree
    finish_metrics: Callable[[Metrics], Metrics] = dict
    hidden: Callable[[list[int]], list[int]] = lambda unused: []
    combined: CombinedGrads | None = None

    def cotangent(self, factor: Tensor | None) -> Tensor:
        """Return the gradient of the mean loss, times `factor`, with respect to `total`."""
        weight = self.loss.weight
        if self.loss.plain:
            # `to` takes 0.7 us even if there is nothing to convert.
            one = weight if weight.dtype == self.total.dtype else weight.to(self.total.dtype)
            return one if factor is None else factor
        # With a weight of 0 the gradient is 0: 1 / 0 would write NaN into the parameters.
        cotangent = torch.where(weight == 0, 0.0, 1.0 / weight).to(self.total.dtype)
        return cotangent if factor is None else cotangent * factor


class Forward:
    """Runs a loss on new detached leaves, or on the leaves of an earlier run.

    `module_params` are the parameters of its module by name, as they are outside of a step.
    """

    def __init__(self, loss: LossFn, name: str, module_params: Mapping[str, nn.Parameter]) -> None:
        self._loss, self._flatten, self._name = loss, Flattener(), name
        self._outside = OutsideParams(name, module_params)
        # Sets of unused leaves, by their indices, of which no checkpoint hides one.
        self._not_hidden: set[tuple[int, ...]] = set()
        self._is_checked = False
        # The structure of the inputs of the loss in the last run, and that of the parameters.
        self._specs: tuple[Any, Any] = None, None

    def __call__(
        self, state: TrainState, batch: PyTree, rng: Tensor | None, params: list[Tensor] | None = None
    ) -> ForwardResult:
        """Return the result; `params` are the leaves of an earlier run, or None for new ones.

        Raises a LossError if the loss changes an input in place, or has no gradient.
        """
        leaves, spec = self._flatten((state.params, state.frozen, batch, state.buffers))
        last_spec, params_spec = self._specs
        if last_spec is not spec:
            params_spec = spec.child(0)
            self._specs = spec, params_spec
        # A captured run cannot be repeated to find hidden leaves (`_hidden`), so they are recorded in this one.
        inputs = CheckpointInputs() if _torch.is_capturing() else None
        with torch.set_grad_enabled(True), inputs or nullcontext():
            if params is None:
                params = [*map(Tensor.requires_grad_, map(Tensor.detach, leaves[: params_spec.num_leaves]))]
            leaves[: len(params)] = params
            memory = None if self._is_checked else _memory_of(leaves)
            mean, metrics, buffers = run_loss(self._loss, leaves, spec, rng=rng, name=self._name)
        _require_differentiable(mean, self._name)
        buffers = _like(buffers, state.buffers, self._name)
        if memory is not None:
            new_memory = _memory_of(leaves)
            if memory != new_memory:
                # Torch does not count a write through `.data` in the version of the tensor.
                index = _first_difference(memory, new_memory)
                raise _written_in_place(self._name, index, spec, " through its .data")
            self._outside.check(mean.total, leaves, captured=inputs is not None)
            self._is_checked = True
        elif self._outside.suspects:
            self._outside.check_again(mean.total, leaves)
        if inputs is not None and inputs.sets_data:
            raise TraceError(
                f"{self._name}: replaces the data of a tensor (x.data = y), which a graph does not see; assign a "
                "buffer itself (self.b = y), or write into it (self.b.copy_(y))"
            )
        loss = Mean(mean.total.detach(), mean.weight, mean.plain)
        if not mean.plain:
            # An integer count of tokens, or a narrower float, must not lower the precision of the gradient.
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
        if tuple(unused) in self._not_hidden or (inputs is None and _torch.is_fake(params[0])):
            return []
        if inputs is None:
            with warnings.catch_warnings(), backends.of(params[0].device).seeded(0), CheckpointInputs() as inputs:
                warnings.simplefilter("ignore")
                self(*arguments)
        hidden = [index for index in unused if id(params[index]) in inputs.ids]
        if not hidden:
            self._not_hidden.add(tuple(unused))
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
        refuse_weight(name)


def refuse_weight(name: str) -> NoReturn:
    """Raises a LossError: the weight of the loss depends on the parameters, which the gradient would not include."""
    raise LossError(f"{name}: the weight of the Mean depends on the parameters; detach it")


def detach(values: PyTree) -> PyTree:
    """Detach every tensor of a tree from its graph."""
    if values is None or values == {}:
        return values
    return tree.map(lambda leaf: leaf.detach() if tree.is_tensor(leaf) else leaf, values)


def run_loss(
    loss: LossFn, leaves: Sequence[Any], spec: optree.PyTreeSpec, *, rng: Tensor | None, name: str
) -> LossOutput:
    """Call a loss on the leaves of its inputs, in the order of `INPUTS`. Raises a LossError if it wrote to one."""
    # `unflatten` makes new containers, so a loss may add or remove items.
    params, frozen, batch, buffers = spec.unflatten(leaves)
    old_versions = versions(leaves)
    try:
        output = loss(tree.overlay(params, frozen), batch, rng=rng, buffers=buffers)
    except Exception as error:
        if isinstance(error, RuntimeError) and LEAF_WRITTEN in str(error):
            raise _written_in_place(name, _find_written(loss, leaves, spec, rng), spec) from error
        for note in batch_notes(error, (params, frozen), batch):
            add_note(error, f"{name}: {note}")
        raise
    new_versions = versions(leaves)
    if new_versions != old_versions:
        raise _written_in_place(name, _first_difference(old_versions, new_versions), spec)
    return output


def versions(leaves: Sequence[Any]) -> list[int | None]:
    """Return how often each tensor was written in place; None for other leaves and for inference tensors."""
    try:
        return [*map(_torch.version_of, leaves)]
    except (AttributeError, RuntimeError):
        # A leaf has no version. Checking each leaf before the call would take twice as long in the usual case.
        return [
            _torch.version_of(leaf) if isinstance(leaf, Tensor) and not leaf.is_inference() else None for leaf in leaves
        ]


def _memory_of(leaves: Sequence[Any]) -> list[tuple[int, bytes] | None]:
    """Return the id of the storage of each tensor and the bytes of its first elements; waits for the device.

    None for other leaves, and for sparse and nested tensors.
    """
    return [
        (_torch.storage_id(leaf), _beginning(leaf))
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested
        else None
        for leaf in leaves
    ]


def _beginning(leaf: Tensor) -> bytes:
    """Return the bytes of the first elements of a tensor; b"" if its values cannot be read. Waits for the device."""
    if type(leaf) not in (Tensor, nn.Parameter) or leaf.is_meta or _torch.is_transformed(leaf):
        return b""
    first = leaf.detach().flatten()[:COMPARED].resolve_conj().resolve_neg()
    return as_bytes(first.to(tree.HOST).contiguous()).tobytes()


def _first_difference(old: Sequence[Any], new: Sequence[Any]) -> int:
    """Return the index of the first leaf with different values in `old` and `new`; 0 if there is none."""
    for index, (old_value, new_value) in enumerate(zip(old, new, strict=True)):
        if old_value != new_value:
            return index
    return 0


def _find_written(loss: LossFn, leaves: Sequence[Any], spec: optree.PyTreeSpec, rng: Tensor | None) -> int:
    """Return the index of the leaf that a loss writes in place. Runs the loss on copies, which it may write to."""
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    old_versions = versions(copies)
    params, frozen, batch, buffers = tree.unflatten(spec, copies)
    with torch.enable_grad():
        loss(tree.overlay(params, frozen), batch, rng=rng, buffers=buffers)
    return _first_difference(old_versions, versions(copies))


def _written_in_place(name: str, index: int, spec: optree.PyTreeSpec, how: str = "") -> LossError:
    """Return the error for a loss that wrote the input with this index among the leaves of its inputs."""
    inputs = dict(zip(INPUTS, tree.unflatten(spec, range(spec.num_leaves)), strict=True))
    path = tree.leaf_names(inputs)[tree.leaves(inputs).index(index)]
    return LossError(
        f"{name}: changed its input {path} in place{how}; a loss must be a pure function: work on a copy "
        "(x = x.clone()), and return new buffers instead of writing them. A target network moves between steps "
        "(docs/guide.md), and averages of weights are those of ft.ema. If a module initialises parameters by its first "
        "batch, run it once before step.init()"
    )


def _like(returned: PyTree, buffers: PyTree, name: str) -> PyTree:
    """Return the new buffers in the containers of the old ones.

    Raises a StructureError if they do not have the paths, shapes and dtypes of the old ones.
    """
    if tree.is_blank(returned) and tree.is_blank(buffers):
        return buffers
    new_leaves, new_spec = tree.flatten(returned)
    old_leaves, old_spec = tree.flatten(buffers)
    if new_spec == old_spec and all(
        isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(new_leaves, old_leaves, strict=True)
    ):
        return returned
    what = "the tree of buffers it returned (run a module that shapes them by its first batch once before step.init())"
    tree.require_same(name, what, returned, buffers)
    # The loss may return a tuple for a named tuple, say; the next step and a checkpoint need the old containers.
    by_path = dict(zip(_paths(returned), new_leaves, strict=True))
    return tree.unflatten(old_spec, [by_path[path] for path in _paths(buffers)])


def _paths(values: PyTree) -> list[tuple[str, ...]]:
    return [tuple(map(str, path)) for path in optree.tree_paths(values, namespace=NAMESPACE)]
