"""Metrics: they stay on the device until the metrics of several steps are read together."""

from __future__ import annotations

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

    Raises a ComposeError when the metrics of a step are no dict, and a LossError when one is called ``step`` or
    ``seconds``.
    """
    for step, _, metrics in steps:
        if not isinstance(metrics, Mapping):
            raise ComposeError(
                f"fit: the step returned {type(metrics).__name__} as the metrics of step {step}; needs a dict of "
                'values by name: return state, {"loss": loss}'
            )
    records = []
    for (step, seconds, _), metrics in zip(steps, read_metrics([each.metrics for each in steps]), strict=True):
        when = {"step": step, "seconds": round(seconds, 4)}
        if not when.keys().isdisjoint(metrics):
            report(metrics, "fit", **when)
        records.append({**when, **metrics})
    return records


def require_same_rates(step: Any, steps: Sequence[StepMetrics], records: Sequence[Mapping[str, Any]]) -> None:
    """Check that this rank made its steps with the scheduled values that the records of the first rank have.

    Raises an OptionError that names the value. The ranks would otherwise train with different rates.
    """
    for (number, _, metrics), record in zip(steps, records, strict=True):
        for name in step.optimizer.schedules if isinstance(step, Step) else ():
            if metrics[name] != record[name]:
                raise OptionError(
                    f"fit: {name} of step {number} is {metrics[name]} on this rank, and {record[name]} on rank 0; a "
                    "schedule, and the state that adapt returns, must be the same on all ranks"
                )


def read_evaluation(returned: Any) -> dict[str, Any]:
    """Return what an evaluation returned as numbers, with ``eval_`` before names that do not begin so.

    Raises an OptionError when it is not a dict of numbers by name, or two of the names become the same.
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
    """Copy the metrics of several steps to the host, waiting for the device once for each dtype and shape.

    Numbers, or nested lists of them, take the place of tensors of any shape, of `Mean`, and of what is of numpy, also
    within dicts, lists and tuples; these become dicts and lists.
    """
    read = [*map(dict, rows)]
    groups: dict[tuple[Any, ...], list[tuple[Any, Any, Tensor]]] = {}
    for row in read:
        _collect(row, row.items(), groups)
    for tensors in groups.values():
        values = torch.stack([tensor for _, _, tensor in tensors]).tolist()
        for (container, key, _), value in zip(tensors, values, strict=True):
            container[key] = float(value) if isinstance(value, bool) else value
    return read


def _collect(
    container: Any, items: Iterable[tuple[Any, Any]], groups: dict[tuple[Any, ...], list[tuple[Any, Any, Tensor]]]
) -> None:
    """Add the tensors of a dict or list to those of their dtype, device and shape, with the places of their numbers.

    What is of numpy becomes numbers at once: it is on the host, and nothing waits for the device.
    """
    for key, metric in items:
        value = metric.value if isinstance(metric, Mean) else metric
        if isinstance(value, Tensor):
            groups.setdefault((value.dtype, value.device, value.shape), []).append((container, key, value))
        elif isinstance(value, dict):
            container[key] = copied = dict(value)
            _collect(copied, copied.items(), groups)
        elif isinstance(value, list | tuple):
            container[key] = numbers = list(value)
            _collect(numbers, enumerate(numbers), groups)
        else:
            container[key] = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
