"""The loss, the metrics and the buffers of all ranks. The first two are all-reduced while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import LossError
from ftrain.parallel.batch_rows import Rows, current
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import start_sum_all, start_sum_all_wide
from ftrain.step.forward import ForwardResult
from ftrain.step.value_and_grad import ValueAndGrad
from ftrain.types import GradFn, Gradients, Mean, Metrics, PyTree, TrainState, replace


class LossResults:
    """Sums the results of a loss over all ranks."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._started: Callable[[], Any] | None = None

    def started_by(self, grad: GradFn) -> GradFn:
        """Return `grad` so that it starts the sums between its forward and its backward pass.

        A gradient of several microbatches, of a scaled loss or with a check for finite numbers is returned as it is.
        """
        if self._ranks.size == 1 or not isinstance(grad, ValueAndGrad) or grad.scale or grad.reports_finite:
            return grad
        return grad.around_forward(self._starting)

    def _starting(self, forward: Callable[..., ForwardResult]) -> Callable[..., ForwardResult]:
        def run(state: TrainState, *args: Any) -> ForwardResult:
            result = forward(state, *args)
            rows = current()
            # Some metrics are known only after the backward pass.
            if rows is not None and result.finish_metrics is dict:
                self._started = self._start(_addends(result.loss.total, result.metrics, rows))
            return result

        return run

    def of_all_ranks(self, local: Gradients, buffers: PyTree, rows: Rows) -> Gradients:
        """Return the gradients with the loss, the metrics, the buffers and `finite` of all ranks.

        The weight of the loss is already that of all ranks. `buffers` are those of the state.
        """
        if self._ranks.size == 1:
            return local
        started, self._started = self._started, None
        if started is None:
            addends = _addends(local.loss.total, local.metrics, rows)
            addends["not_finite"] = None if local.finite is None else (~local.finite).to(torch.int32)
            started = self._start(addends)
        # Not earlier: a backward pass that computes a part of the model again, by `torch.utils.checkpoint`, changes
        # buffers, too.
        changes, spec = tree.flatten(tree.map(rows.share_of, _buffer_changes(buffers, local.buffers)))
        sums_of_changes = start_sum_all(self._ranks, changes)
        sums = started()
        return replace(
            local,
            loss=replace(local.loss, total=sums["total"]),
            metrics=sums["metrics"],
            buffers=_changed_buffers(buffers, local.buffers, tree.unflatten(spec, sums_of_changes())),
            finite=None if local.finite is None else sums["not_finite"] == 0,
        )

    def _start(self, addends: dict[str, Any]) -> Callable[[], Any]:
        """Start to sum a tree; return a function that waits for the sums."""
        leaves, spec = tree.flatten(addends)
        results = start_sum_all_wide(self._ranks, [leaf for leaf in leaves if tree.is_tensor(leaf)])

        def wait() -> Any:
            sums = iter(results())
            return tree.unflatten(spec, [next(sums) if tree.is_tensor(leaf) else leaf for leaf in leaves])

        return wait


def _addends(total: Tensor, metrics: Metrics, rows: Rows) -> dict[str, Any]:
    """Return the tree that is summed over ranks: the total of the loss, and of each metric this rank's share."""
    # On one device, because they are sent in one buffer: a loss may make a metric on the host.
    metrics = {name: tree.to(metric, total.device) for name, metric in metrics.items()}
    shares = {name: metric if isinstance(metric, Mean) else rows.share_of(metric) for name, metric in metrics.items()}
    return {"total": total, "metrics": shares}


def require_scalars(metrics: Metrics) -> None:
    """Check that metrics are 0-d, so that they have a mean over ranks. Raises a LossError for a metric with an axis."""
    for name, metric in metrics.items():
        if isinstance(metric, Tensor) and metric.ndim:
            raise LossError(
                f"sharded: the metric {name} is {tree.describe(metric)}; on ranks a metric is a 0-d tensor or a Mean. "
                "Return its mean, or leave it out"
            )


def _buffer_changes(old: PyTree, new: PyTree) -> PyTree:
    """Return the change of each floating-point buffer in a step; 0 for buffers of integers or bools.

    Ranks take the mean of the changes, so that a buffer that nothing changes keeps its bits.
    """

    def change(new: Tensor, old: Tensor) -> Tensor:
        return new - _finite(old) if new.is_floating_point() else new.new_zeros(())

    return tree.map(change, new, old)


def _changed_buffers(old: PyTree, new: PyTree, changes: PyTree) -> PyTree:
    """Return the buffers with the changes of all ranks. Buffers of integers or bools are those of this rank."""

    def changed(new: Tensor, old: Tensor, change: Tensor) -> Tensor:
        return _finite(old) + change.to(old.dtype) if new.is_floating_point() else new

    return tree.map(changed, new, old, changes)


def _finite(old: Tensor) -> Tensor:
    """Return a buffer with 0 in place of NaN and infinity, from which its change is counted.

    Infinity minus infinity would be NaN. An attention mask holds infinities, and so does a running minimum at first.
    """
    return old.nan_to_num(0.0, 0.0, 0.0)
