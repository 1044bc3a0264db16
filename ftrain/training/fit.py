"""`fit`: train a step over data, with metrics, logs, evaluations and checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal

from ftrain._torch.store import rank_and_size
from ftrain.checkpoint import Checkpoints
from ftrain.errors import Interrupted, require_switches
from ftrain.parallel.agreement import Agreement
from ftrain.step.across_ranks import ranks_of
from ftrain.step.step import Step
from ftrain.training.early_stopping import Adapt, Stop
from ftrain.training.loggers import Logger
from ftrain.training.metrics import Evaluate
from ftrain.training.options import Options
from ftrain.training.progress import Count, Display, show
from ftrain.training.resume import RunCheckpoints
from ftrain.training.run import FitResult, Run, S
from ftrain.training.signals import EXIT_CODE_BASE, interruptible
from ftrain.training.step_votes import StepVotes
from ftrain.transforms.compile.wrapper import is_compiling
from ftrain.types import PyTree


def fit(
    step: Callable[[S, Any], tuple[S, Mapping[str, Any]]],
    state: S,
    data: Iterable[PyTree],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    stop: Stop | None = None,
    adapt: Adapt | None = None,
    checkpoints: Checkpoints | None = None,
    resume: Literal["auto", "must", "never"] = "auto",
    loggers: Sequence[Logger] = (),
    log_every: int = 10,
    throughput: Mapping[str, Count] | None = None,
    progress: bool = True,
    donate: bool = True,
    on_oom: Literal["raise", "split"] = "raise",
    on_nonfinite: Literal["warn", "raise", "ignore"] = "warn",
) -> FitResult[S]:
    """Run `step` over `data`, with records, progress, evaluations and checkpoints; return ``(state, history)``.

    Metrics stay on the device and are read together every `log_every` steps; nothing else waits for the device.
    Ctrl-C ends the run after the current step, or before one that is still being compiled, and returns the newest
    state; a second one interrupts at once.

    With `checkpoints` the run resumes from the newest one in the directory: state, position in the data, history and
    log are bitwise those of a run that was never interrupted, except for times. Ctrl-C and SIGTERM then save after the
    current step, print the path, and exit the process with code 130 or 143; a second signal ends it at once and does
    not change earlier checkpoints.

    A step on many ranks (`ftrain.sharded`) trains when every rank calls this with the same arguments. The first rank
    shows progress, and calls the loggers; `evaluate`, `adapt` and `stop` run on every rank, and what the first one's
    `stop` returns counts. All end after the same step, and write each checkpoint together. The same holds for a
    function as `step` on all ranks of torch's process group (with `torch.nn.parallel.DistributedDataParallel`, say): it
    must make the same number of steps on each.

    Args:
        step: a `Step`, or any function ``(state, batch) -> (state, metrics)``.
        state: the state from ``step.init()``, or of an earlier run. Consumed if `donate` is true.
        data: any iterable of batches, such as `ftrain.data.loader` or a `torch.utils.data.DataLoader`. A batch is any
            tree; its tensors are moved to the device of the state.
        steps: train until the state has made this number of steps, over as many passes as needed.
        epochs: train for this number of passes over the data. Default, without `steps`: 1.
        evaluate: ``state -> {name: number}``. It must copy (`ftrain.tree.clone`) what it keeps of a donated state.
            Names get the prefix ``eval_``, unless they have it: the ``loss`` of `ftrain.evaluate` is ``eval_loss`` in
            the history, and for `stop`, `adapt` and ``best=``.
        evaluate_every: evaluate every so many steps, and at the end. Default: only at the end.
        stop: ``history -> reason to stop, or ""``, such as `ftrain.patience`. Called after each evaluation; without
            `evaluate`, each time that metrics are read.
        adapt: ``(state, history) -> state``, such as `ftrain.plateau`. Called after `stop`; returns the state to
            continue with, which may be its argument. Consumes the state if `donate` is true.
        checkpoints: where and how often to save; the last state is saved too. Default: nothing is saved.
        resume: ``"auto"`` resumes if there is a checkpoint, ``"must"`` requires one, ``"never"`` that there is none.
        loggers: functions that get each record, such as `ftrain.loggers.jsonl`.
        log_every: read metrics every so many steps.
        throughput: functions that count items of a batch, by name, shown per second. With ``sharded(batches="rows")``
            the counts of all ranks are added up; if `step` is a function they are those of the first rank. On several
            ranks an error of one is raised when metrics are read next.
        progress: show a bar in a terminal, otherwise lines.
        donate: reuse the memory of each state for the next one; `Step` only.
        on_oom: ``"split"`` retries a step that runs out of memory, with its batch in twice as many pieces, and stays at
            that number, which the record of this step has as ``split`` and a run that resumes keeps. The update is the
            same, except that batch statistics, and dropout that is not counter-based, are those of each piece; a loss
            that is a plain number must be a mean over examples. If the step had begun to overwrite its state, the run
            goes back to the newest checkpoint. `Step` only.
        on_nonfinite: what to do about the first metric ``loss`` that is infinite or NaN, except in steps that
            `skip_nonfinite` or fp16 have skipped: ``"warn"``, and never remove the newest checkpoint before it;
            ``"raise"`` a NonFiniteError, so that no later state is saved; or ``"ignore"`` it.

    Returns:
        ``(state, history)``: the last state, and the `History`; its ``stopped`` is the reason why the run ended.

    Raises:
        ComposeError: when `step` cannot be called, is a class, or is swapped with the state; when `adapt` returns
            None; or for ``on_oom="split"`` if `step` is not a `Step`, or on several ranks with `update_in_backward`, or
            with `compiled` and ``offload("opt_state")``.
        OptionError: for an argument that is not as above; `evaluate_every` without `evaluate`, or `stop` or `adapt`
            with `evaluate` alone; a metric that is not recorded (`patience`, `plateau`, ``best=``); or arguments that
            differ from those of the first rank.
        DeviceError: when not even one example fits in memory, with the `anatomy` of the step; or when a state was
            overwritten, and there is no checkpoint.
        DataError: when there is no batch, or the data is a single one (a dict or a tensor), or ends before `steps` is
            reached, or earlier than on another rank.
        BatchError: on every rank, when ranks that must have the same batches have different ones; one step later, so
            a state that was saved after that step may be wrong.
        NonFiniteError: when `skip_nonfinite` has reached its limit, or for ``on_nonfinite="raise"``; nothing is saved.
        CheckpointError: when a checkpoint cannot be read or written, or `resume` does not allow it.
        StructureError: when the checkpoint has a state of another structure, as of another model.
        Interrupted: after a signal, when there are checkpoints.
        RankError: when another rank has failed between steps, or does not answer.
        Exception: any error of a step, the data or a logger. Every error has the newest state and the history, as
            `fit` returns them, in its ``result``, unless it has another ``result``. With checkpoints, the newest state
            is saved before an error of a logger, of `evaluate`, `stop` or `adapt` is raised, but not after one of a
            step or the data: the state may be overwritten in part, or the position in the data lost.
    """
    # A function may use other ranks in a way that cannot be seen: all ranks of the process group are then one run.
    ranks = ranks_of(step.wrappers) if isinstance(step, Step) else rank_and_size()[1]
    options = Options(
        steps=steps,
        epochs=epochs,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        stop=stop,
        adapt=adapt,
        checkpoints=checkpoints,
        resume=resume,
        loggers=loggers,
        log_every=log_every,
        throughput=throughput or {},
        donate=donate,
        on_oom=on_oom,
        on_nonfinite=on_nonfinite,
    )
    signals = [signal.SIGINT] if checkpoints is None else [signal.SIGINT, signal.SIGTERM]
    with Agreement(ranks) as agreement:
        _require_valid(options, agreement, step, state, ranks)
        require_switches("fit", progress=progress)
        saves = RunCheckpoints(checkpoints, step, data, resume, is_first=agreement.is_first)
        if resume == "must":  # Before a directory is made.
            agreement.together("looking for a checkpoint", saves.require_one)
        with (
            checkpoints or nullcontext(),
            show(progress and agreement.is_first) as display,
            # On several ranks no step is abandoned: the other ranks would wait in it.
            interruptible(signals, is_compiling if ranks == 1 else lambda frame: False) as received,
        ):
            compares_batches = isinstance(step, Step) and step.loss.ranks is not None and step.loss.ranks.whole_batches
            votes = StepVotes(agreement, received, compares_batches=compares_batches, log_every=log_every)
            donating = step.donating if isinstance(step, Step) and donate else step
            point = saves.load(state, donate=donating is not step)
            run = Run(donating, data, options, point, checkpoints=saves, display=display, votes=votes)
            # Only the run may refer to a state now, so that the memory of the first one can be freed.
            del state, point
            _train(run)
    run.history.stopped = run.stopped or ("data" if steps is None or run.step < steps else "steps")
    if number := votes.agreed_signal():
        run.history.stopped = "interrupt"
        _end_on_signal(number, checkpoints, run, prints=agreement.is_first)
    return run.result


def _require_valid(options: Options, agreement: Agreement, step: Any, state: Any, ranks: int) -> None:
    """Raise an error for options that are wrong, or differ between ranks; warn of those that may surprise."""
    if not agreement.is_alone:
        agreement.require_same(options.comparable())
    options.require_valid(step, state, ranks)
    if agreement.is_first:
        options.warn_of_surprises(step)


def _train(run: Run) -> None:
    """Make the steps of a run, with the work before, between and after them."""
    records = run.steps()
    try:
        run.start()
        for record in records:
            run.after_step(record, records)
            if run.is_ending:
                break
        run.finish()
        # Data that reports its position continues from there in the next run.
        records.close()
    except BaseException as error:
        try:
            run.rescue(error)
        finally:
            # Otherwise this happens when the error is freed, and moves the data of a later run.
            with suppress(Exception):
                records.close()
        raise


def _end_on_signal(number: signal.Signals, checkpoints: Checkpoints | None, run: Run, *, prints: bool) -> None:
    """Print where the run has ended, and with checkpoints raise `Interrupted`, which ends the process."""
    where = f" after step {run.step}; returns what was trained"
    if checkpoints is not None and prints:
        steps = checkpoints.steps()
        saved = f"saved in {checkpoints.path(steps[-1])}; the same call continues from there" if steps else ""
        where = f", {saved or 'before any step'}"
    if prints:
        Display().say(f"fit: ended by {number.name}{where}")
    if checkpoints is not None:
        interrupted = Interrupted(EXIT_CODE_BASE + number)
        interrupted.result = run.result
        raise interrupted
