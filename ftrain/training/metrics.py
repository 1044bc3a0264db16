"""Read the metrics of several steps from the device together, so that a run rarely waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ftrain.errors import ComposeError, OptionError
from ftrain.step.loss_forms import report
from ftrain.step.step import Step
from ftrain.types import Mean, Metrics

Evaluate: TypeAlias = Callable[[Any], Mapping[str, float]]
"""``state -> {name: number}``."""

EVALUATION = "eval_"
"""Prefix of the names under which the results of an evaluation are recorded."""


class StepMetrics(NamedTuple):
    """The metrics that a step returned, on the device; and the seconds since the run began."""

    step: int
    seconds: float
    metrics: Metrics


def read_steps(steps: Sequence[StepMetrics]) -> list[dict[str, Any]]:
    """Return one record for each step; waits for the device.

    Raises a ComposeError if the metrics of a step are not a dict, and a LossError if one is called ``step`` or
    ``seconds``.
    """
    for step, _, metrics in steps:
        if not isinstance(metrics, Mapping):
            raise ComposeError(
                f"fit: the step returned {type(metrics).__name__} as the metrics of step {step}; needs a dict of "
                'values by name: return state, {"loss": loss}'
            )
    records = []
    for (step, seconds, _), metrics in zip(steps, read_metrics([row.metrics for row in steps]), strict=True):
        added = {"step": step, "seconds": round(seconds, 4)}
        if not added.keys().isdisjoint(metrics):
            report(metrics, "fit", **added)  # Raises the LossError.
        records.append({**added, **metrics})
    return records


def require_same_rates(step: Any, steps: Sequence[StepMetrics], records: Sequence[Mapping[str, Any]]) -> None:
    """Raises an OptionError if a scheduled value of a step on this rank differs from the record of the first rank."""
    for (number, _, metrics), record in zip(steps, records, strict=True):
        for name in step.optimizer.schedules if isinstance(step, Step) else ():
            if metrics[name] != record[name]:
                raise OptionError(
                    f"fit: {name} of step {number} is {metrics[name]} on this rank, and {record[name]} on rank 0; a "
                    "schedule, and the state that adapt returns, must be the same on all ranks"
                )


def read_evaluation(returned: Any) -> dict[str, Any]:
    """Return the result of an evaluation as numbers, with the prefix ``eval_`` for names that do not have it.

    Waits for the device. Raises an OptionError if it is not a dict of numbers by name, or two of the names become the
    same.
    """
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        description = f"the keys {[*returned]}" if isinstance(returned, Mapping) else type(returned).__name__
        raise OptionError(
            f"fit: evaluate returned {description}; needs a dict of numbers by name, such as "
            'ft.evaluate(ft.eval_step(loss_fn), state, batches) or {"accuracy": 0.9}'
        )
    named = {name if name.startswith(EVALUATION) else f"{EVALUATION}{name}": value for name, value in returned.items()}
    if len(named) < len(returned):
        raise OptionError(
            f"fit: evaluate returned two numbers that are recorded under one name: {', '.join(returned)}; rename one"
        )
    (values,) = read_metrics([named])
    return values


def read_metrics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of several steps as numbers; waits for the device once for each dtype and shape.

    A tensor, a `Mean` or a numpy value becomes a number, or a nested list of numbers. Mappings, lists, tuples and
    deques may contain them, and become dicts and lists.
    """
    results = [dict(row) for row in rows]
    groups: dict[tuple[Any, ...], list[tuple[Any, Any, Tensor]]] = {}
    for result in results:
        _collect(result, result.items(), groups)
    for tensors in groups.values():
        values = torch.stack([tensor for _, _, tensor in tensors]).tolist()
        for (container, key, _), value in zip(tensors, values, strict=True):
            container[key] = float(value) if isinstance(value, bool) else value
    return results


def _collect(
    container: Any, items: Iterable[tuple[Any, Any]], groups: dict[tuple[Any, ...], list[tuple[Any, Any, Tensor]]]
) -> None:
    """Add the tensors of a dict or list to the groups by dtype, device and shape, with the place for their numbers.

    Numpy values become numbers at once: they are on the host, so nothing waits for the device.
    """
    for key, metric in items:
        value = metric.value if isinstance(metric, Mean) else metric
        if isinstance(value, Tensor):
            groups.setdefault((value.dtype, value.device, value.shape), []).append((container, key, value))
        elif isinstance(value, Mapping):
            container[key] = copied = dict(value)
            _collect(copied, copied.items(), groups)
        elif isinstance(value, list | tuple | deque):
            container[key] = numbers = list(value)
            _collect(numbers, enumerate(numbers), groups)
        else:
            container[key] = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
