"""`fit`: train a step over data, with metrics, logs, evaluations, checkpoints and everything else around it."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from ftrain._torch.store import rank_and_size
from ftrain.checkpoint import Checkpoints
from ftrain.errors import ComposeError, Interrupted, OptionError, require_callable, require_positive
from ftrain.parallel.agreement import Agreement
from ftrain.step.across_ranks import ranks_of
from ftrain.step.evaluate import EvalStep
from ftrain.step.microbatch import SPLIT, require_on_oom
from ftrain.step.step import Step
from ftrain.training.early_stopping import Adapt, Stop
from ftrain.training.loggers import Logger
from ftrain.training.metrics import Evaluate
from ftrain.training.nonfinite_loss import NonFiniteLossCheck
from ftrain.training.options import Options
from ftrain.training.progress import Lines, show
from ftrain.training.resume import RunCheckpoints
from ftrain.training.run import FitResult, Run, S
from ftrain.training.signals import EXIT_CODE_BASE, interruptible
from ftrain.training.step_votes import StepVotes
from ftrain.training.throughput import Count
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
    """Train: run `step` over `data`, record, show, evaluate and save; return ``(state, history)``.

    Metrics stay on the device and are read together every `log_every` steps; nothing else waits for the device.
    Ctrl-C ends the run after the current step and returns what was trained; a second one interrupts at once. A step
    that is still being compiled is not waited for: the run ends before it.

    With `checkpoints` the run resumes from the newest checkpoint in the directory: state, position in the data,
    history and log are bitwise those of a run that was never interrupted, but for times. Ctrl-C and SIGTERM then save
    after the current step, print where, and exit the process with code 130 or 143; a second signal ends it at once,
    and leaves earlier checkpoints as they were.

    A step on many ranks (`ftrain.sharded`) trains when every rank calls this with the same arguments. The first rank
    shows progress and calls the loggers, and its records are the history of all ranks. They stop after the same step:
    where `stop` says so on the first rank, or one step after any of them got a signal. `evaluate` and `adapt` run on
    every rank. What fails in one of them, in `stop` or in a logger, on one rank, is an error on all. All write each
    checkpoint together, and signals end each process with the same code. The same holds for all ranks of torch's
    process group when `step` is a function, which must then make as many steps on each: one with a model in
    `torch.nn.parallel.DistributedDataParallel`, say.

    Args:
        step: a `Step`, or any function ``(state, batch) -> (state, metrics)``.
        state: from ``step.init()``, or of an earlier run. Consumed, when `donate` is true.
        data: any iterable of batches, such as `ftrain.data.loader` or a `torch.utils.data.DataLoader`; a
            batch is any tree, and its tensors are moved to the device of the state.
        steps: train until the state has made so many steps, over as many passes as that takes.
        epochs: train for so many passes over the data. Default, without `steps`: 1.
        evaluate: ``state -> {name: number}``; must copy (`ftrain.tree.clone`) what it keeps of a state
            that is donated. Its results are recorded with ``eval_`` before their names, unless these begin so: the
            ``loss`` of `ftrain.evaluate` is ``eval_loss`` in the history, and for `stop`, `adapt` and ``best=``.
        evaluate_every: evaluate after each so many steps, and at the end. Default: only at the end.
        stop: ``history -> reason to stop, or ""``, called after each evaluation, or without `evaluate` each time that
            metrics are read; such as `ftrain.patience`.
        adapt: ``(state, history) -> state``, called when `stop` is, returns the state to go on with, or the same one;
            such as `ftrain.plateau`. Consumes the state, when `donate` is true.
        checkpoints: where and how often to save; the last state is saved, too. Default: nothing is saved.
        resume: ``"auto"`` resumes if there is a checkpoint, ``"must"`` requires one, and ``"never"`` requires that
            there be none.
        loggers: functions that get each record, such as `ftrain.loggers.jsonl`.
        log_every: how often metrics are read, in steps.
        throughput: name -> function that counts such items in a batch, to be shown per second. With
            ``sharded(batches="rows")`` the counts of all ranks are added up; of a function they are the first rank's.
        progress: show a bar, or lines where there is no terminal.
        donate: reuse the memory of each state for the next one; `Step` only.
        on_oom: ``"split"`` retries a step that runs out of memory, with the same batch in twice as many pieces, and
            stays at that number: the same update, except that batch statistics, and dropout that is not
            counter-based, are those of each piece. A loss that is a plain number must be a mean over examples; `fit`
            warns if it sees that it is not: return a `Mean` then. The record of that step has the number of pieces as
            ``split``, and a run that resumes keeps it. If the step had begun to overwrite its state, the run goes back
            to the newest checkpoint. `Step` only. On many ranks all split when one runs out of memory before the
            update.
        on_nonfinite: what to do about the first metric ``loss`` that is infinite or NaN, except in steps that
            `skip_nonfinite` or fp16 have skipped: ``"warn"``, and keep the newest checkpoint from before it for good;
            ``"raise"`` a NonFiniteError, so that no later state is saved; or ``"ignore"`` it.

    Returns:
        ``(state, history)``: the last state, and the `History`, whose ``stopped`` says why the run ended.

    Raises:
        ComposeError: when `step` cannot be called, is a class, or stands where the state does; or is to be split and
            is no `Step`; for ``on_oom="split"`` on several ranks with `update_in_backward`, or with `compiled` beside
            ``offload("opt_state")``; or when `adapt` returns None.
        OptionError: for an `evaluate`, `stop`, `adapt`, logger or count of `throughput` that is no function, or a
            `stop` that returns one; `evaluate_every` without `evaluate`, a metric that is not recorded (`patience`,
            `plateau`, ``best=``), numbers that are not positive, or another `resume`, `on_oom` or `on_nonfinite`; or
            for arguments that are not those of the first rank.
        DeviceError: when steps are split and not even one example fits, with the `anatomy` of the step; or when a
            state was overwritten, and there is no checkpoint.
        DataError: when there is no batch, or the data ends before `steps` is reached.
        BatchError: on every rank, when ranks that take their rows of one batch have other batches; one step
            later, so that a state that was saved after that step may be of them.
        NonFiniteError: when `skip_nonfinite` has reached its limit, or for ``on_nonfinite="raise"``; nothing is saved.
        CheckpointError: when a checkpoint cannot be read or written, or is not as `resume` requires.
        StructureError: when the checkpoint is of another model, or of an optimizer or wrapper with another state (the
            moments of `adamw` have the form of those of `lamb`, and are taken).
        Interrupted: after a signal, when there are checkpoints.
        RankError: when another rank has failed between steps, has other arguments or has not come.
        Exception: whatever a step, the data or a logger raises. Every error has what was trained until then, as `fit`
            returns it, in its ``result``, unless it has another ``result``. With checkpoints, the newest state is
            saved before an error of a logger, of `evaluate`, `stop` or `adapt` is raised. After an error in a step or
            in the data it is not, because the state may be overwritten in part, or the position in the data lost.
    """
    # What a function does with other ranks cannot be seen: where there are some, they are one run.
    ranks = ranks_of(step.wrappers) if isinstance(step, Step) else rank_and_size()[1]
    agreement = Agreement(ranks)
    options = Options(
        steps, epochs, evaluate, evaluate_every, stop, adapt, loggers, log_every, throughput or {}, on_oom
    )
    signals = [signal.SIGINT] if checkpoints is None else [signal.SIGINT, signal.SIGTERM]
    with agreement:
        if not agreement.is_alone:
            agreement.require_same(_comparable(options, checkpoints, resume, on_nonfinite, donate))
        _require(step, state, on_oom, log_every=log_every, evaluate_every=evaluate_every)
        _require_services(options, checkpoints)
        _require_agreement(step, ranks, on_oom)
        if agreement.is_first:
            _warn_if_best_is_missed(checkpoints, evaluate_every)
        check_loss = NonFiniteLossCheck(on_nonfinite, checkpoints, is_first=agreement.is_first)
        saves = RunCheckpoints(checkpoints, data, resume, is_first=agreement.is_first)
        with (
            checkpoints or nullcontext(),
            show(progress and agreement.is_first) as display,
            # A rank that abandons a step leaves the others in it.
            interruptible(signals, is_compiling if ranks == 1 else lambda frame: False) as received,
        ):
            whole_batches = isinstance(step, Step) and step.loss.ranks is not None and step.loss.ranks.whole_batches
            votes = StepVotes(agreement, received, compares_batches=whole_batches, log_every=log_every)
            donating = step.donating if isinstance(step, Step) and donate else step
            run = Run(
                donating,
                data,
                options,
                saves.load(state, donate=donating is not step),
                checkpoints=saves,
                check_loss=check_loss,
                display=display,
                interrupted=votes.agreed_signal,
                agreement=agreement,
            )
            # The run alone holds a state from here on, so that the memory of the first one can be freed.
            del state
            _train(run, votes)
    data_ended = steps is None or run.step < steps
    run.history.stopped = "interrupt" if votes.agreed_signal() else run.stopped or ("data" if data_ended else "steps")
    if checkpoints and (number := votes.agreed_signal()):
        raise _interrupted(number, checkpoints, run.result, say=agreement.is_first)
    return run.result


OF_CHECKPOINTS = "every", "keep", "best", "mode"
"""What ranks must have alike of their `Checkpoints`."""


def _comparable(options: Options, checkpoints: Checkpoints | None, *others: Any) -> dict[str, Any]:
    """Return what ranks that train together must have alike among the arguments of `fit`, by name."""
    functions = {name: getattr(options, name) for name in ("evaluate", "stop", "adapt")}
    return {
        # Machines may see one directory under different paths: `Checkpoints` compares the directory itself.
        "checkpoints": checkpoints and {name: getattr(checkpoints, name, None) for name in OF_CHECKPOINTS},
        **dict(zip(("resume", "on_nonfinite", "donate"), others, strict=True)),
        **{name: getattr(options, name) for name in ("steps", "epochs", "evaluate_every", "log_every", "on_oom")},
        **{name: function if function is None else "a function" for name, function in functions.items()},
        "throughput": [*options.throughput],
    }


def _train(run: Run, votes: StepVotes) -> None:
    batch = None
    try:
        run.start()
        steps = run.steps()
        for record in () if run.stopped else steps:
            run.after_step(record, steps)
            batch = record.batch
            if votes.after_step(batch, record.step) or run.stopped:
                break
        votes.at_end(batch)
        run.finish()
        votes.at_end()
    except BaseException as error:
        run.rescue(error)
        raise


def _interrupted(number: signal.Signals, checkpoints: Checkpoints, result: FitResult[Any], *, say: bool) -> Interrupted:
    """Print where the run is saved, if this rank is to say so, and return the error that ends the process."""
    if say:
        steps = checkpoints.steps()
        path = checkpoints.path(steps[-1]) if steps else None
        where = f"saved in {path}; the same call goes on from there" if path else "before any step"
        Lines().say(f"fit: ended by {number.name}, {where}")
    error = Interrupted(EXIT_CODE_BASE + number)
    error.result = result
    return error


def _require_services(options: Options, checkpoints: Any) -> None:
    evaluate, evaluate_every = options.evaluate, options.evaluate_every
    loggers: Any = options.loggers
    needed = {
        "evaluate": (evaluate, "state -> {name: number}, such as lambda state: ft.evaluate(eval_step, state, batches)"),
        "stop": (options.stop, "history -> why, such as ft.patience('eval_loss')"),
        "adapt": (options.adapt, "(state, history) -> state, such as ft.plateau('eval_loss', rule)"),
    }
    for name, (value, form) in needed.items():
        if value is not None and not callable(value):
            raise OptionError(f"fit: {name} is {type(value).__name__}; needs a function {form}")
    if isinstance(evaluate, EvalStep):
        raise OptionError(f"fit: evaluate is an eval_step, of one batch; needs a function {needed['evaluate'][1]}")
    if evaluate_every is not None and evaluate is None:
        raise OptionError(f"fit: evaluate_every={evaluate_every} needs evaluate=, a function {needed['evaluate'][1]}")
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise OptionError(f"fit: checkpoints is {checkpoints!r}; needs ft.Checkpoints(directory, every=...)")
    if not isinstance(loggers, Sequence) or isinstance(loggers, str) or not all(map(callable, loggers)):
        raise OptionError(
            f"fit: loggers is {loggers!r}; needs a list of functions of a record, such as [ft.loggers.jsonl(path)]"
        )
    _require_counts(options.throughput)


def _require_counts(throughput: Any) -> None:
    if not isinstance(throughput, Mapping) or not all(map(callable, throughput.values())):
        raise OptionError(
            f"fit: throughput is {throughput!r}; needs functions of a batch by name, such as "
            '{"tokens": lambda batch: batch["tokens"].numel()}'
        )


def _require(step: Any, state: Any, on_oom: str, **every: int | None) -> None:
    require_callable("fit", step, state, "fit(step, state, data)")
    require_on_oom("fit", on_oom)
    if on_oom == SPLIT and not isinstance(step, Step):
        raise ComposeError(f"fit: on_oom='split' needs a Step, whose gradient can be split; found {step!r}")
    for name, value in every.items():
        if value is not None:
            require_positive("fit", name, value)


def _require_agreement(step: Any, ranks: int, on_oom: str) -> None:
    if ranks > 1 and on_oom == SPLIT and (step.updates_in_backward or (step.is_compiled and step.optimizer.offloaded)):
        excess = "update_in_backward" if step.updates_in_backward else "compiled beside offload('opt_state')"
        raise ComposeError(
            f"fit: on_oom='split' on {ranks} ranks needs a step without {excess}: all ranks must know that one has run "
            "out of memory before they update; use ft.accumulate(n)"
        )


def _warn_if_best_is_missed(checkpoints: Checkpoints | None, evaluate_every: int | None) -> None:
    best = "" if checkpoints is None else checkpoints.best or ""
    if checkpoints and evaluate_every and best.startswith("eval_") and evaluate_every % checkpoints.every:
        warnings.warn(
            f"fit: evaluate_every={evaluate_every} is no multiple of Checkpoints(every={checkpoints.every}), so that "
            f"some evaluations are of steps that are not saved, which cannot become the best by {best!r}: evaluate at "
            "steps that are saved, or save more often",
            stacklevel=3,
        )
