"""Weigh the losses and metrics of microbatches that have different numbers of examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ftrain import tree
from ftrain.step.forward import ForwardResult
from ftrain.step.value_and_grad import around_forward
from ftrain.types import GradFn, Mean, Metrics, PyTree, TrainState, replace


def weighted_by_examples(grad: GradFn) -> GradFn:
    """Return a gradient function whose losses and metrics that are plain numbers count once per example.

    Those that are a `Mean` keep their weights.
    """
    return around_forward(grad, _weigh)


def _weigh(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``(state, batch, ...)``, a forward pass, or a `GradFn` whose forward pass cannot be called alone."""

    def weighing(state: TrainState, batch: PyTree, *more: Any) -> Any:
        result, length = run(state, batch, *more), tree.batch_length(batch) or 1
        loss, weight = result.loss, torch.full_like(result.loss.weight, length)
        if loss.plain:
            loss = Mean(loss.total * weight, loss.weight * weight)

        def weigh(metrics: Metrics) -> Metrics:
            return {name: m if isinstance(m, Mean) else Mean(m * weight, weight) for name, m in metrics.items()}

        if not isinstance(result, ForwardResult):
            return replace(result, loss=loss, metrics=weigh(result.metrics))
        with torch.enable_grad():
            total = result.total * weight if result.loss.plain else result.total
        return replace(
            result, total=total, loss=loss, finish_metrics=lambda metrics: weigh(result.finish_metrics(metrics))
        )

    return weighing
