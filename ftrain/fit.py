"""Training: the loop with its services, which alone talks to people and to the disk."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from ftrain.checkpoint import Checkpoints
from ftrain.checks import require_positive
from ftrain.errors import ComposeError, ConsumedError, Interrupted
from ftrain.feedback import Adapt, Stop
from ftrain.history import History
from ftrain.interrupts import EXIT, interruptible
from ftrain.loggers import Logger
from ftrain.loop import StepRecord, iterate
from ftrain.pieces import RAISE, SPLIT, require_on_oom
from ftrain.progress import show
from ftrain.recorder import Count, Evaluate, Recorder
from ftrain.saved import Saved
from ftrain.splitting import Splitting, reloading
from ftrain.step import Step
from ftrain.types import PyTree


class FitResult(NamedTuple):
    """What `fit` returns: the last state, and the `History` of the run."""

    state: Any
    history: History


def fit(
    step: Callable[..., Any],
    state: Any,
    data: Iterable[PyTree],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    stop: Stop | None = None,
    adapt: Adapt | None = None,
    checkpoints: Checkpoints | None = None,
    resume: str = "auto",
    loggers: Sequence[Logger] = (),
    log_every: int = 10,
    throughput: Mapping[str, Count] | None = None,
    progress: bool = True,
    donate: bool = True,
    on_oom: str = RAISE,
) -> FitResult:
    """Train: run `step` over `data`, record, show, evaluate and save; return ``(state, history)``.

    Metrics stay on the device and are read together every `log_every` steps; nothing else waits for it.
    Ctrl-C ends the run after the current step, and what was trained so far is returned; a second one
    interrupts at once.

    With `checkpoints` the run goes on where the directory says it was: state, position in the data,
    history and log are those of a run that was never interrupted, to the bit. Ctrl-C and SIGTERM then
    save after the current step and leave the process with code 130 or 143.

    Args:
        step: a `Step`, or any function ``(state, batch) -> (state, metrics)``.
        state: from ``step.init()``, or of an earlier run. Consumed, when `donate` is true.
        data: any iterable of batches, such as `ftrain.data.loader` or a `torch.utils.data.DataLoader`; a
            batch is any tree, and its tensors are moved to the device of the state.
        steps: train until the state has made so many steps, over as many passes as that takes.
        epochs: or so many passes over the data; one, when neither is given.
        evaluate: ``state -> {name: number}``; must copy (`ftrain.tree.clone`) what it keeps of a state
            that is donated. Recorded under these names, with ``eval_`` before those
            that metrics of the step have.
        evaluate_every: how often, in steps; and always at the end.
        stop: told the `History` after each evaluation, or without one each time that metrics are read;
            says why to stop, or "". `ftrain.patience` is one.
        adapt: ``(state, history) -> state``, told as often, returns the state to go on with, or the same one;
            `ftrain.plateau` is one. Consumes the state, when `donate` is true.
        checkpoints: where to save; every so many steps, and at the end.
        resume: ``"auto"`` goes on when there is something to go on from, ``"must"`` demands it, and
            ``"never"`` demands that there be nothing.
        loggers: functions of a record, such as `ftrain.loggers.jsonl`.
        log_every: how often metrics are read, in steps.
        throughput: name -> how many of that a batch holds, shown per second.
        progress: show a bar, or lines where there is no terminal.
        donate: let each state take the memory of the one before; `Step` only.
        on_oom: ``"split"`` tries a step that runs out of memory again, with the same batch in twice as many pieces,
            and keeps to that: the same update, but that batch statistics, and dropout that is not counter-based, are
            of each piece. The record of that step says so, as ``split``, and a run that goes on from a checkpoint goes
            on with it. If the state had begun to be overwritten, the run goes on from the newest checkpoint. `Step`
            only.

    Raises:
        ComposeError: when `step` cannot be called, or is to be split and no `Step`.
        OptionError: for numbers that are not positive, or another `resume` or `on_oom`.
        DeviceError: when steps are split and not even one example fits, with the `anatomy` of the step; or when a
            state was overwritten, and there is no checkpoint.
        DataError: when there is no batch, or the data ends before `steps` is reached.
        NonFiniteError: when `skip_nonfinite` has reached its limit.
        CheckpointError: when nothing can be read or written, or `resume` demands what is not there.
        StructureError: when the checkpoint is of another model, optimizer or wrapper.
        Interrupted: after a signal, when there are checkpoints.
        Exception: whatever a step, the data or a logger raises; any error holds what was trained until
            then, as `fit` returns it, in its ``result``.
    """
    _require(step, on_oom, log_every=log_every, evaluate_every=evaluate_every)
    run = Recorder(step, steps, tuple(loggers), throughput or {}, int(getattr(state, "step", 0)))
    saved = Saved(checkpoints, data, run, resume)
    with checkpoints or nullcontext(), show(progress) as display, interruptible(_signals(checkpoints)) as interrupted:
        stepping = step.donating if isinstance(step, Step) and donate else step
        state, position = saved.restore(state, donate=stepping is not step)
        # Only where a run that was not interrupted has asked, too.
        asked = run.last_evaluation == run.step if evaluate else run.step % log_every == 0 or saved.due(run.step)
        latest, made, stopped = state, None, stop(run.history) if stop and run.history and asked else ""
        try:
            loop = functools.partial(iterate, data=data, steps=steps, epochs=epochs)
            running = Splitting(stepping, run, display.say) if on_oom == SPLIT else stepping  # type: ignore[arg-type]
            records = reloading(loop, running, state, position, saved)
            for made in () if stopped else records:
                latest = made.state
                run.add(made)
                evaluating = evaluate is not None and evaluate_every and made.step % evaluate_every == 0
                if made.step % log_every == 0 or evaluating or saved.due(made.step):
                    run.read(latest, display)
                    if evaluate and evaluating:
                        run.evaluated(evaluate, latest, made.step, display)
                    if evaluating or not evaluate:
                        stopped = stop(run.history) if stop else ""
                        made = _adapted(records, made, adapt, run.history)
                        latest = made.state
                saved.save(made, every=True)
                if stopped or interrupted():
                    break
            run.read(latest, display)
            if evaluate and run.last_evaluation != run.step and not (checkpoints and interrupted()):
                run.evaluated(evaluate, latest, run.step, display)
                latest = adapt(latest, run.history) if adapt else latest
            if made is not None:
                saved.save(made._replace(state=latest))
        except BaseException as error:
            # Of any error, so that nothing that was trained is lost.
            error.result = FitResult(latest, run.history)  # type: ignore[attr-defined]
            with suppress(ConsumedError):
                run.read(latest, display, check=False)
            raise
    run.history.stopped = "interrupt" if interrupted() else stopped or _ended(run.step, steps)
    result = FitResult(latest, run.history)
    if checkpoints and (number := interrupted()):
        raise _leaving(EXIT + number, result)
    return result


def _signals(checkpoints: Checkpoints | None) -> list[signal.Signals]:
    return [signal.SIGINT] if checkpoints is None else [signal.SIGINT, signal.SIGTERM]


def _ended(step: int, steps: int | None) -> str:
    return "data" if steps is None or step < steps else "steps"


def _leaving(code: int, result: FitResult) -> Interrupted:
    leaving = Interrupted(code)
    leaving.result = result
    return leaving


def _require(step: Any, on_oom: str, **every: int | None) -> None:
    if not callable(step):
        raise ComposeError(f"fit: the step is {type(step).__name__}; needs a Step or a function (state, batch)")
    require_on_oom("fit", on_oom)
    if on_oom == SPLIT and not isinstance(step, Step):
        raise ComposeError(f"fit: on_oom='split' needs a Step, whose gradient can be split; found {step!r}")
    for name, value in every.items():
        if value is not None:
            require_positive("fit", name, value)


def _adapted(
    records: Generator[StepRecord, Any, None], made: StepRecord, adapt: Adapt | None, history: History
) -> StepRecord:
    state = adapt(made.state, history) if adapt else made.state
    return made if state is made.state else records.send(state)
