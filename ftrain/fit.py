"""The loop: the only place that reads a clock, talks to people, or waits for the device."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.checks import require_positive
from ftrain.errors import ComposeError, DataError, OptionError
from ftrain.grad import report
from ftrain.loggers import History, Logger
from ftrain.progress import Display, Status, show
from ftrain.purity import as_tree
from ftrain.reader import Flattener
from ftrain.step import Step
from ftrain.types import Mean, Metrics, PyTree

Evaluate = Callable[[Any], Mapping[str, float]]
Count = Callable[[PyTree], int]
EVALUATION = "eval_"


class FitResult(NamedTuple):
    """What `fit` returns: the last state, and the `History` of the run."""

    state: Any
    history: History


class StepRecord(NamedTuple):
    """What `iterate` yields after each step.

    Args:
        step: steps done, as the state counts them.
        state: the state after the step; consumed by the next one when the step donates.
        metrics: of the step, as it returned them: nothing has waited for the device.
        batch: the batch, on the device.
    """

    step: int
    state: Any
    metrics: Metrics
    batch: PyTree


def iterate(
    step: Callable[..., Any],
    state: Any,
    data: Iterable[PyTree],
    *,
    steps: int | None = None,
    epochs: int | None = None,
) -> Iterator[StepRecord]:
    """Run a step over data and yield after each: the loop of `fit`, for those who write their own around it.

    Args:
        step: a `Step`, or any function ``(state, batch) -> (state, metrics)``.
        state: the state to start from; steps are counted from its ``step``, or from 0 if it has none.
        data: any iterable of batches; gone through again as often as it takes, if it can be.
        steps: stop when the state has made so many steps.
        epochs: stop after so many passes over the data; one, when neither is given.

    Raises:
        OptionError: for numbers that are not positive, or several epochs of data that passes but once.
        DataError: when there is no batch, or the data ends before `steps` is reached.
    """
    _require_limits(data, steps, epochs)
    count = int(getattr(state, "step", 0))
    device = _device(state)
    last_epoch = epochs if epochs is not None else (1 if steps is None else None)
    epoch, flatten = 0, Flattener()
    while (steps is None or count < steps) and (last_epoch is None or epoch < last_epoch):
        before = count
        for given in data:
            batch = _moved(as_tree(given), device, flatten)
            state, metrics = step(state, batch)
            count += 1
            yield StepRecord(count, state, metrics, batch)
            if steps is not None and count >= steps:
                return
        epoch += 1
        if count == before or (steps is not None and isinstance(data, Iterator) and epochs is None):
            raise DataError(_ended(count, steps, epoch, empty=count == before))


def fit(
    step: Callable[..., Any],
    state: Any,
    data: Iterable[PyTree],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    loggers: Sequence[Logger] = (),
    log_every: int = 10,
    throughput: Mapping[str, Count] | None = None,
    progress: bool = True,
    donate: bool = True,
) -> FitResult:
    """Train: run `step` over `data`, record, show and evaluate; return ``(state, history)``.

    Metrics stay on the device and are read together every `log_every` steps; nothing else waits for it.
    Ctrl-C ends the run after the current step, and what was trained so far is returned; a second one
    interrupts at once.

    Args:
        step: a `Step`, or any function ``(state, batch) -> (state, metrics)``.
        state: from ``step.init()``, or of an earlier run. Consumed, when `donate` is true.
        data: any iterable of batches, such as a `torch.utils.data.DataLoader`; a batch is any tree, and
            its tensors are moved to the device of the state.
        steps: train until the state has made so many steps, over as many passes as that takes.
        epochs: or so many passes over the data; one, when neither is given.
        evaluate: ``state -> {name: number}``; must copy (`ftrain.tree.clone`) what it keeps of a state
            that is donated. Recorded under these names, with ``eval_`` before those
            that metrics of the step have.
        evaluate_every: how often, in steps; and always at the end.
        loggers: functions of a record, such as `ftrain.loggers.jsonl`.
        log_every: how often metrics are read, in steps.
        throughput: name -> how many of that a batch holds, shown per second.
        progress: show a bar, or lines where there is no terminal.
        donate: let each state take the memory of the one before; `Step` only.

    Raises:
        ComposeError: when `step` cannot be called.
        OptionError: for numbers that are not positive.
        DataError: when there is no batch, or the data ends before `steps` is reached.
        NonFiniteError: when `skip_nonfinite` has reached its limit.
        Exception: whatever a step, the data or a logger raises; any error holds what was trained until
            then, as `fit` returns it, in its ``result``.
    """
    if not callable(step):
        raise ComposeError(f"fit: the step is {type(step).__name__}; needs a Step or a function (state, batch)")
    for name, value in (("log_every", log_every), ("evaluate_every", evaluate_every)):
        if value is not None:
            require_positive("fit", name, value)
    run = _Run(step, steps, tuple(loggers), throughput or {}, int(getattr(state, "step", 0)))
    stepping = step.donating if isinstance(step, Step) and donate else step
    latest, done = state, -1
    with show(progress) as display, _interruptible() as interrupted:
        try:
            for made in iterate(stepping, state, data, steps=steps, epochs=epochs):
                latest = made.state
                run.add(made)
                if made.step % log_every == 0:
                    run.read(latest, display)
                if evaluate and evaluate_every and made.step % evaluate_every == 0:
                    run.read(latest, display)
                    run.evaluated(evaluate, latest, made.step, display)
                    done = made.step
                if interrupted():
                    run.history.stopped = "interrupt"
                    break
            run.read(latest, display)
            if evaluate and done != run.step:
                run.evaluated(evaluate, latest, run.step, display)
        except BaseException as error:
            # Of any error, so that nothing that was trained is lost.
            error.result = FitResult(latest, run.history)  # type: ignore[attr-defined]
            run.read(latest, display, check=False)
            raise
    run.history.stopped = run.history.stopped or ("data" if steps is None or run.step < steps else "steps")
    return FitResult(latest, run.history)


class _Run:
    """Collects metrics on the device, and turns them into records now and then."""

    def __init__(
        self,
        step: Callable[..., Any],
        total: int | None,
        loggers: tuple[Logger, ...],
        counts: Mapping[str, Count],
        start: int,
    ) -> None:
        self.history = History()
        self.step = start
        self._check = step.check if isinstance(step, Step) else None
        self._total, self._loggers, self._counts = total, loggers, counts
        self._first, self._start = start, time.perf_counter()
        self._names: set[str] = set()
        self._streak = 0
        self._pending: list[tuple[int, float, Metrics]] = []
        self._window = _Window(self._start, counts)

    def add(self, made: StepRecord) -> None:
        self.step = made.step
        self._window.add(made.batch)
        self._pending.append((made.step, time.perf_counter() - self._start, made.metrics))

    def read(self, state: Any, display: Display, *, check: bool = True) -> None:
        """Wait for the device once, and record all steps since the last time."""
        pending, self._pending = self._pending, []
        values = read_metrics([metrics for _, _, metrics in pending])
        for (step, seconds, _), metrics in zip(pending, values, strict=True):
            self._names.update(metrics)
            own = {"step": step, "seconds": round(seconds, 4)}
            if not own.keys().isdisjoint(metrics):
                report(metrics, "fit", **own)
            self._record({**own, **metrics})
        if pending and display.due(self.step, self._total, time.perf_counter() - self._start):
            display.update(self._status(state, values[-1]))
        if check and self._check:
            self._check(state, self._longest_streak(values))

    def _longest_streak(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Most skipped steps in a row up to now, those before the last reading included."""
        longest = self._streak
        for row in rows:
            self._streak = self._streak + 1 if row.get("skipped") else 0
            longest = max(longest, self._streak)
        return longest

    def evaluated(self, evaluate: Evaluate, state: Any, step: int, display: Display) -> None:
        """Evaluate, and record the result; the time it takes does not count as training."""
        before = time.perf_counter()
        (values,) = read_metrics([evaluate(state)])
        result = {f"{EVALUATION}{name}" if name in self._names else name: value for name, value in values.items()}
        self._record({"step": step, **result})
        display.say(f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in result.items()))
        self._window.pause(time.perf_counter() - before)

    def _record(self, record: dict[str, Any]) -> None:
        self.history.append(record)
        for logger in self._loggers:
            logger(record)

    def _status(self, state: Any, metrics: Mapping[str, Any]) -> Status:
        now = time.perf_counter()
        rates, per_step = self._window.rates(now)
        left = per_step * (self._total - self.step) if self._total is not None else None
        memory = backends.of(_device(state)).memory().peak
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


def _moved(batch: PyTree, device: torch.device, flatten: Flattener) -> PyTree:
    """`ftrain.tree.to`, which has nothing to do when the batch is there already."""
    if all(isinstance(leaf, Tensor) and leaf.device == device for leaf in flatten(batch)[0]):
        return batch
    return tree.to(batch, device)


def _device(state: Any) -> torch.device:
    """Where a state lives: counters and keys stay on the CPU, and what is trained may be elsewhere."""
    devices = [leaf.device for leaf in tree.leaves(state) if isinstance(leaf, Tensor)]
    return next((device for device in devices if device != tree.HOST), tree.HOST)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a question that the loop asks.

    There is none outside the main thread, nor where interrupts are ignored, as in a job of the background.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[bool] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def _require_limits(data: Iterable[PyTree], steps: int | None, epochs: int | None) -> None:
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None:
            require_positive("fit", name, value)
    if not isinstance(data, Iterable):
        raise DataError(f"fit: data is {type(data).__name__}; needs an iterable of batches")
    if epochs is not None and epochs > 1 and isinstance(data, Iterator):
        raise OptionError(
            f"fit: epochs={epochs} needs data that can be gone through again, and this is an iterator; pass the "
            "list or DataLoader it was made from, or use steps="
        )


def _ended(count: int, steps: int | None, epoch: int, *, empty: bool) -> str:
    if empty and epoch == 1:
        return "fit: the data has no batch; needs an iterable of at least one (is drop_last cutting the only one?)"
    return (
        f"fit: the data ended at step {count} of {steps}, and cannot be gone through again; pass a list or DataLoader "
        "instead of an iterator, or fewer steps. The error's result holds what was trained"
    )
