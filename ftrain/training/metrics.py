"""What a run records: metrics that wait on the device, read together now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftrain import backends
from ftrain.errors import OptionError
from ftrain.step.step import Step
from ftrain.step.value_and_grad import report
from ftrain.training.history import History
from ftrain.training.iterate import StepRecord, device_of
from ftrain.training.loggers import Logger, rewind
from ftrain.training.nonfinite_loss import LossWatch
from ftrain.training.progress import Display, Status
from ftrain.types import Mean, Metrics, PyTree

Evaluate = Callable[[Any], Mapping[str, float]]
Count = Callable[[PyTree], int]
EVALUATION = "eval_"


class Recorder:
    """Collects metrics on the device, and turns them into records now and then."""

    def __init__(
        self,
        step: Callable[..., Any],
        total: int | None,
        loggers: tuple[Logger, ...],
        counts: Mapping[str, Count],
        start: int,
        watch: LossWatch,
    ) -> None:
        self.history = History()
        self.step = start
        self._check = step.check if isinstance(step, Step) else None
        self._total, self._loggers, self._counts, self._watch = total, loggers, counts, watch
        self._start = time.perf_counter()
        self._checked = start
        self.last_evaluation = self.settled = -1
        self._pending: list[tuple[int, float, Metrics]] = []
        self._window = _Window(self._start, counts)

    def add(self, made: StepRecord) -> None:
        """Take the metrics of a step, without waiting for them."""
        self.step = made.step
        self._window.add(made.batch)
        self._pending.append((made.step, time.perf_counter() - self._start, made.metrics))

    def read(self, state: Any, display: Display, *, check: bool = True) -> None:
        """Wait for the device once, and record all steps since the last time."""
        pending, self._pending = self._pending, []
        values = read_metrics([metrics for _, _, metrics in pending])
        records = []
        for (step, seconds, _), metrics in zip(pending, values, strict=True):
            own = {"step": step, "seconds": round(seconds, 4)}
            if not own.keys().isdisjoint(metrics):
                report(metrics, "fit", **own)
            records.append({**own, **metrics})
        try:
            self._record(records)
        finally:
            if pending and display.due(self.step, self._total, time.perf_counter() - self._start):
                display.update(self._status(state, values[-1]))
            if check:
                self._watch(records)
            if check and self._check:
                self._check(state, self._checked)
                self._checked = self.step

    def packed(self) -> PyTree:
        """What a run that goes on from here must know beside the history."""
        return {"checked": self._checked, "last_evaluation": self.last_evaluation, "settled": self.settled}

    def restore(self, packed: PyTree, history: History, step: int) -> None:
        """Go on from the history until a step, and from what `packed` has returned there."""
        self.history = history
        self._checked = packed.get("checked", step)
        self.step, self.last_evaluation = step, packed["last_evaluation"]
        self.settled = packed.get("settled", step)
        self._pending = []
        # The clock goes on, too.
        self._start = time.perf_counter() - max(self.history["seconds"], default=0.0)
        rewind(self._loggers, step, sum(record["step"] == step for record in self.history))

    def forget(self) -> None:
        """Take back what loggers have of a run that was killed before anything of it was saved."""
        rewind(self._loggers, self.step + 1, 0)

    def at(self, step: int) -> dict[str, Any]:
        """All that was recorded of a step."""
        found: dict[str, Any] = {}
        for record in reversed(self.history):
            if record["step"] != step:
                break
            found = {**record, **found}
        return found

    def evaluated(self, evaluate: Evaluate, state: Any, display: Display) -> None:
        """Evaluate, and record the result; the time it takes does not count as training."""
        before = time.perf_counter()
        (values,) = read_metrics([_named(evaluate(state))])
        self.last_evaluation = self.step
        self._record([{"step": self.step, **values}])
        texts = [
            f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        ]
        display.say(f"step {self.step}  {'  '.join(texts)}")
        self._window.pause(time.perf_counter() - before)

    def _record(self, records: Sequence[dict[str, Any]]) -> None:
        self.history.extend(records)
        _tell(self._loggers, records)

    def _status(self, state: Any, metrics: Mapping[str, Any]) -> Status:
        now = time.perf_counter()
        rates, per_step = self._window.rates(now)
        left = per_step * (self._total - self.step) if self._total is not None else None
        memory = backends.of(device_of(state)).memory().peak
        return Status(self.step, self._total, now - self._start, left, rates, memory, metrics)


class _Window:
    """Rates over the time since the last reading."""

    def __init__(self, start: float, counts: Mapping[str, Count]) -> None:
        self._start, self._counts = start, counts
        self._steps, self._items = 0, dict.fromkeys(counts, 0)

    def add(self, batch: PyTree) -> None:
        self._steps += 1
        for name, count in self._counts.items():
            self._items[name] += count(batch)

    def pause(self, seconds: float) -> None:
        self._start += seconds

    def rates(self, now: float) -> tuple[dict[str, float], float]:
        """Return items per second by name and seconds per step, and start over."""
        elapsed = max(now - self._start, 1e-9)
        rates, per_step = (
            {name: items / elapsed for name, items in self._items.items()},
            elapsed / max(self._steps, 1),
        )
        self._start, self._steps, self._items = now, 0, dict.fromkeys(self._counts, 0)
        return rates, per_step


def _tell(loggers: Sequence[Logger], records: Sequence[dict[str, Any]]) -> None:
    """Give records to each logger, whichever of them fails."""
    if loggers:
        try:
            for record in records:
                loggers[0](record)
        finally:
            _tell(loggers[1:], records)


def _named(evaluation: Any) -> dict[str, Any]:
    """What an evaluation returned, under the names by which it is recorded.

    Raises:
        OptionError: when it is no dict of numbers by name.
    """
    if not isinstance(evaluation, Mapping):
        raise OptionError(
            f"fit: evaluate returned {type(evaluation).__name__}; needs a dict of numbers by name, such as "
            'ft.evaluate(ft.eval_step(loss_fn), state, batches) or {"accuracy": 0.9}'
        )
    named = {name if name.startswith(EVALUATION) else f"{EVALUATION}{name}": name for name in evaluation}
    if len(named) < len(evaluation):
        raise OptionError(
            f"fit: of what evaluate returned two are recorded under one name: {', '.join(evaluation)}; rename one"
        )
    return {name: evaluation[origin] for name, origin in named.items()}


def read_metrics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bring the metrics of several steps to the host, waiting for the device once per dtype."""
    read = [{name: m.value if isinstance(m, Mean) else m for name, m in row.items()} for row in rows]
    places = [(i, name, value) for i, row in enumerate(read) for name, value in row.items()]
    groups: dict[tuple[Any, ...], list[tuple[int, str, Tensor]]] = {}
    for i, name, value in places:
        if isinstance(value, Tensor):
            groups.setdefault((value.dtype, value.device, value.shape), []).append((i, name, value))
    for group in groups.values():
        values = torch.stack([value for _, _, value in group]).tolist()
        for (i, name, _), value in zip(group, values, strict=True):
            read[i][name] = float(value) if isinstance(value, bool) else value
    return read
