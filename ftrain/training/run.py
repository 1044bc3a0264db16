"""The run of `fit`: what happens at its start, after each step, and at its end."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from ftrain import backends, tree
from ftrain._torch import dtensor
from ftrain.errors import CheckpointError, ComposeError, ConsumedError, NonFiniteError, OptionError, RankError, add_note
from ftrain.parallel.agreement import Agreement
from ftrain.parallel.rank_watch import watch
from ftrain.step.microbatch import SPLIT
from ftrain.step.step import Step
from ftrain.training.early_stopping import Adapt
from ftrain.training.history import History, column, record_of
from ftrain.training.iterate import Position, StepRecord, device_of_state, iterate, position_of
from ftrain.training.logger_calls import call_loggers, rewind_loggers
from ftrain.training.loss_additivity import warn_if_not_additive
from ftrain.training.metrics import StepMetrics, read_evaluation, read_steps, require_same_rates
from ftrain.training.nonfinite_loss import NonFiniteLossCheck
from ftrain.training.oom_retry import OomRetry, StateOverwrittenError, recorded_pieces
from ftrain.training.options import Options
from ftrain.training.progress import Display, Throughput, describe, describe_evaluation, total_steps
from ftrain.training.resume import LastSteps, ResumePoint, RunCheckpoints
from ftrain.training.signals import Abandoned
from ftrain.training.step_votes import END_OF_DATA, END_OF_RUN, StepVotes
from ftrain.types import PyTree

Records = Generator[StepRecord, Any, None]
"""Yields after each step; `send` replaces the state."""

S = TypeVar("S")


class FitResult(NamedTuple, Generic[S]):
    """What `fit` returns: the last state, and the `History` of the run."""

    state: S
    history: History


class Run:
    """A run of `fit`: its state, its records, and the work before, between and after its steps.

    The first rank calls the loggers; all ranks have equal records. An error of one rank between steps ends all ranks.
    """

    _newest: StepRecord
    _last: LastSteps
    _position: Position | None
    _start_time: float
    history: History
    """The records of the run."""
    stopped = ""
    """The reason that `stop` has returned; "" while there is none."""
    is_ending = False
    """Whether the run makes no further step."""
    _between_steps = False

    def __init__(
        self,
        step: Any,
        data: Iterable[PyTree],
        options: Options,
        point: ResumePoint,
        *,
        checkpoints: RunCheckpoints,
        display: Display,
        votes: StepVotes,
    ) -> None:
        self._step, self._data, self._options = step, data, options
        self._checkpoints, self._display, self._votes = checkpoints, display, votes
        agreement = self._agreement = votes.agreement
        self._check_loss = NonFiniteLossCheck(options.on_nonfinite, options.checkpoints, is_first=agreement.is_first)
        self._loggers = options.loggers if agreement.is_first else ()
        self._throughput = Throughput(time.perf_counter(), options.throughput, keeps_errors=not agreement.is_alone)
        ranks = step.loss.ranks if isinstance(step, Step) else None
        self._has_rows = ranks is not None and not ranks.whole_batches
        self._best = None if options.checkpoints is None else options.checkpoints.best
        accumulates = isinstance(step, Step) and step.microbatches > 1
        self._splitter = "accumulate" if accumulates else "sharded" if ranks else ""
        self._tracks_position = options.checkpoints is not None and getattr(step, "is_compiled", False)
        if options.checkpoints is not None and point.position is not None:
            display.say(f"fit: continues from {options.checkpoints.path(point.step)}")
        self._continue_from(point)

    @property
    def step(self) -> int:
        """Steps done."""
        return self._newest.step

    @property
    def result(self) -> FitResult[Any]:
        """The newest state, and the history."""
        return FitResult(self._newest.state, self.history)

    def start(self) -> None:
        """Evaluate, adapt and stop after the step of the checkpoint, if an error has kept the earlier run from it."""
        if not self._can_save:
            return
        self._between_steps = True
        reads, evaluated = self._reads_after(self.step), self._last.last_evaluation == self.step
        # `stop` is called after evaluations, and without `evaluate` each time that metrics are read.
        may_stop = evaluated if self._options.evaluate else reads
        if (reads or evaluated) and self._last.settled != self.step:
            self._evaluate_and_adapt(None)
            # The checkpoint of this step gets the metrics by which it may be the best.
            self._save(wait=False)
        elif may_stop:
            self.stopped = self._stop_reason() if self.history else ""
        self._between_steps = False

    def steps(self) -> Records:
        """Make steps, and yield after each; none if `start` has stopped the run.

        After a step that ran out of memory and lost its state, the run continues from the newest checkpoint.
        """
        if self.stopped:
            return
        options, step, retry = self._options, self._step, None
        options.log_limits(step, self.step, self._newest.epoch, self._total)
        if options.on_oom == SPLIT:
            pieces = recorded_pieces(self.history)
            step = retry = OomRetry(step, pieces, self._display.say, self._votes.agreed_signal, self._agreement)
        while True:
            try:
                passes = yield from iterate(
                    step,
                    self._newest.state,
                    self._data,
                    steps=options.steps,
                    epochs=options.epochs,
                    position=self._position,
                )
            except StateOverwrittenError as error:
                self._continue_from(self._checkpoints.reload(error.state, self.step + 1))
                if retry is not None:
                    retry.restart(recorded_pieces(self.history))
            except Abandoned:
                return
            else:
                if passes is not None:
                    # Data that reports its position is at the beginning of the next pass now, and so is the run.
                    self._newest = self._newest._replace(epoch=passes, batches=0)
                return

    def after_step(self, record: StepRecord, records: Records) -> None:
        """Record a step, and evaluate, adapt, save and show progress if these are due.

        The state that `adapt` returns is sent to `records`, the generator that `steps` returned.
        """
        self._newest, self._can_save, self._between_steps = record, True, True
        self._rewind_loggers()
        self._unread.append(StepMetrics(record.step, time.perf_counter() - self._start_time, record.metrics))
        self._throughput.add(record.batch)
        if self._reads_after(record.step):
            self._read_metrics()
            self._evaluate_and_adapt(records)
        if self._options.checkpoints is not None:
            self._options.checkpoints.check()
            if self._checkpoints.is_due(record.step):
                self._save(wait=False)
        self._between_steps = False
        if record.step % self._options.log_every == 0:
            self._warn_if_not_additive()
        if self._tracks_position:
            # A signal may end the compilation of a later step, whose batch is then already taken from the data.
            self._position = position_of(record, self._data)
        self.is_ending = self._votes.after_step(record.batch, record.step) or bool(self.stopped)

    def finish(self) -> None:
        """Read the remaining metrics, and evaluate and save if that was not done after the last step."""
        data_ended = not self.is_ending and self.step != self._options.steps
        self._votes.at_end(self._newest.batch, place=END_OF_DATA if data_ended else END_OF_RUN)
        self._between_steps = True
        self._read_metrics()
        if self._last.last_evaluation != self.step and not self._is_leaving:
            self._evaluate()
            if self._options.evaluate:
                self._adapt(None)
                self._last = self._last._replace(settled=self.step)
                self._require_best()
        self._save()
        self._checkpoints.wait()
        # A run may be shorter than `log_every`.
        self._warn_if_not_additive()
        self._votes.at_end(place=END_OF_RUN)

    def rescue(self, error: BaseException) -> None:
        """Attach the newest state and the history to an error; save the state if no step has begun to overwrite it."""
        attach_result(error, self.result)
        shared = self._agreement.shares(error)
        if shared and not self._agreement.is_alone:
            # On an error, the context of the checkpoints would not wait for the other ranks.
            with suppress(Exception):
                self._checkpoints.wait()
        if not shared and not isinstance(error, RankError):
            try:
                watch().explain(error)
            except RankError as named:
                attach_result(named, self.result)
                raise
        # No more votes: either the other ranks do the same without them, or they are at another point of the run.
        self._agreement = Agreement(1)
        if isinstance(error, RankError) and not backends.of(device_of_state(self._newest.state)).immediate:
            return  # Queued kernels may wait for that rank forever.
        try:
            self._read_metrics(check=False)
        except ConsumedError:
            return
        except Exception as other:
            if (type(other), other.args) != (type(error), error.args):
                add_note(error, f"fit: not all metrics could be recorded: {other!r}")
            if self._unread:  # A run that continues from this state would lack these records.
                return
        # After an error of a step its state may be partly overwritten, and after one of the data its position is lost.
        if not isinstance(error, Exception) or not self._between_steps or not shared:
            return
        # A state that is not finite must not replace a finite one, and after a failed save another would fail too.
        if isinstance(error, NonFiniteError | CheckpointError):
            return
        try:
            self._save()
        except Exception as other:
            add_note(error, f"fit: the state after step {self.step} could not be saved: {other!r}")

    def _continue_from(self, point: ResumePoint) -> None:
        position = point.position
        epoch, batches = (position.epoch, position.batch) if position else (0, 0)
        self._newest = StepRecord(point.step, point.state, {}, None, epoch, batches)
        self._last, self.history = point.last, point.history
        self._position = position
        # A run that was not loaded and has made no step has nothing to save.
        self._can_save = position is not None
        self._unread: list[StepMetrics] = []
        options = self._options
        self._total = total_steps(options.steps, options.epochs, self._data, point.step, epoch, batches)
        # Seconds continue from the last record.
        self._start_time = time.perf_counter() - max(self.history["seconds"], default=0.0)
        self._logged = point.logged

    def _reads_after(self, step: int) -> bool:
        options = self._options
        return step % options.log_every == 0 or options.evaluates_after(step) or self._checkpoints.is_due(step)

    def _read_metrics(self, *, check: bool = True) -> None:
        """Wait for the device once; record, log and show all steps since the last reading, and check them."""
        unread = self._unread
        self._throughput.total(self._agreement.sums if self._has_rows else list)
        records = self._agreement.decide("reading metrics", lambda: read_steps(unread))
        self._unread = []

        def log_and_check() -> None:
            if not self._agreement.is_alone:
                require_same_rates(self._step, unread, records)
            self._log_and_check(records, check=check)

        self._agreement.together("logging and checking metrics", log_and_check)
        if check and self._options.throughput:
            self._agreement.together("throughput", self._throughput.require_counted)

    def _log_and_check(self, records: Sequence[dict[str, Any]], *, check: bool) -> None:
        try:
            self._log(records)
        finally:
            seconds = time.perf_counter() - self._start_time
            if records and self._display.due(self.step, self._total, seconds):
                self._display.update(self.step, self._total, seconds, self._describe_progress(records[-1]))
            if check:
                self._check_loss(records, self._params_are_finite, self.history)
                if isinstance(self._step, Step):
                    self._step.check(self._newest.state, self._last.checked)
                    self._last = self._last._replace(checked=self.step)

    def _params_are_finite(self) -> bool:
        """Return whether all trained parameters are finite, on all ranks; waits for them and the device."""
        params = tree.leaves(getattr(self._newest.state, "params", self._newest.state))
        local_parts = [dtensor.local_part(leaf) for leaf in params if tree.is_tensor(leaf)]
        return self._agreement.largest(int(not tree.all_finite(local_parts))) == 0

    def _log(self, records: Sequence[dict[str, Any]]) -> None:
        self.history.extend(records)
        if self._loggers and records:
            self._rewind_loggers()
            self._checkpoints.begin_history()
            call_loggers(self._loggers, records)

    def _rewind_loggers(self) -> None:
        """Call the `rewind` of loggers before the first record since the run was loaded.

        Not earlier: a finished run makes no records, and later lines of a log are those of a run that continues it.
        """
        logged, self._logged = self._logged, None
        if logged is not None:
            rewind_loggers(self._loggers, *logged)

    def _describe_progress(self, metrics: Mapping[str, Any]) -> str:
        rates, seconds_per_step = self._throughput.rates(time.perf_counter())
        remaining = seconds_per_step * (self._total - self.step) if self._total is not None else None
        return describe(metrics, rates, remaining, backends.of(device_of_state(self._newest.state)).memory().peak)

    def _warn_if_not_additive(self) -> None:
        """Warn, once in a run that splits its batches, if that changes their losses."""
        function, newest = self._splitter, self._newest
        if function and newest.batch is not None:
            self._splitter = ""
            is_first = self._agreement.is_first
            warn_if_not_additive(function, self._step.loss, newest.state, newest.batch, is_first=is_first)

    def _evaluate_and_adapt(self, records: Records | None) -> None:
        options, step = self._options, self.step
        evaluated = self._last.last_evaluation == step
        evaluates = options.evaluates_after(step) and not (step == options.steps and self._is_leaving)
        if evaluates and not evaluated:
            self._evaluate()
        if evaluates or evaluated or not options.evaluate:
            self._require_best()
            self.stopped = self._stop_reason()
            self._adapt(records)
        self._last = self._last._replace(settled=step)

    def _evaluate(self) -> None:
        """Evaluate and record the result; this time does not count as training."""
        evaluate, state = self._options.evaluate, self._newest.state
        if evaluate is None:
            return
        start = time.perf_counter()
        values = self._agreement.decide("evaluate", lambda: read_evaluation(evaluate(state)))
        self._last = self._last._replace(last_evaluation=self.step, settled=-1)
        self._agreement.together("logging an evaluation", lambda: self._log([{"step": self.step, **values}]))
        self._display.say(describe_evaluation(self.step, values))
        self._throughput.exclude(time.perf_counter() - start)

    def _stop_reason(self) -> str:
        stop = self._options.stop
        return self._agreement.decide("stop", lambda: _require_reason(stop(self.history))) if stop else ""

    def _adapt(self, records: Records | None) -> None:
        adapt = self._options.adapt
        if adapt is None:
            return
        state = self._agreement.together("adapt", lambda: _adapt_state(adapt, self._newest.state, self.history))
        if state is not self._newest.state:
            self._newest = self._newest._replace(state=state) if records is None else records.send(state)

    def _require_best(self) -> None:
        """On the first call, raises an OptionError if the metric of the best checkpoint is not recorded as a number."""
        best, self._best = self._best, None
        value = record_of(self.history, self.step).get(best or "")
        if best is None or type(value) in (bool, int, float):
            return
        column("Checkpoints(best=)", best, self.history)  # Raises an OptionError if no record has it.
        raise OptionError(f"Checkpoints(best=): {best!r} must be a number of each evaluation; found {value!r}")

    def _save(self, *, wait: bool = True) -> None:
        """Save the newest state, unless it is saved already."""
        checkpoints, step = self._checkpoints, self.step
        if not self._can_save or not checkpoints.needs(step, self._last):
            return
        # Not always the position of the data: it may be another after loading, or an abandoned compilation.
        position = self._position
        if position is None or position.step != step:
            position = position_of(self._newest, self._data)
        checkpoints.save(ResumePoint(self._newest.state, step, self._last, self.history, position), wait=wait)

    @property
    def _is_leaving(self) -> bool:
        """Whether the process ends as soon as it has saved."""
        return self._options.checkpoints is not None and self._votes.agreed_signal() is not None


def _require_reason(returned: Any) -> Any:
    if callable(returned):
        raise OptionError(
            'fit: stop returned a function; needs a reason to stop, or "" to go on. If stop is ft.patience itself, '
            "pass what it returns: ft.patience('eval_loss')"
        )
    return returned


def _adapt_state(adapt: Adapt, state: Any, history: History) -> Any:
    adapted = adapt(state, history)
    if not isinstance(adapted, type(state)):
        raise ComposeError(
            f"fit: adapt returned {tree.describe(adapted)}; needs the {type(state).__name__} to go on with, which may "
            "be its argument"
        )
    return adapted


def attach_result(error: BaseException, result: FitResult[Any]) -> None:
    """Set the ``result`` of an error, unless it has a ``result`` of another class."""
    if not isinstance(getattr(error, "result", None), FitResult | None):
        return
    # Not setattr, which frozen dataclasses refuse.
    with suppress(Exception):
        BaseException.__setattr__(error, "result", result)
