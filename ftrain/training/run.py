"""What `fit` does around the steps of a run: evaluate, ask, adapt, save, and lose nothing when something fails."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ftrain.errors import CheckpointError, ComposeError, ConsumedError, NonFiniteError, OptionError
from ftrain.training.early_stopping import Adapt, Stop, column
from ftrain.training.history import History
from ftrain.training.iterate import Position, StepRecord
from ftrain.training.metrics import Evaluate, Recorder
from ftrain.training.progress import Display
from ftrain.training.resume import Saved

Records = Generator[StepRecord, Any, None]


S = TypeVar("S")


class FitResult(NamedTuple, Generic[S]):
    """What `fit` returns: the last state, and the `History` of the run."""

    state: S
    history: History


@dataclass(frozen=True)
class Rules:
    """What is done, and after which steps; the arguments of `fit`."""

    evaluate: Evaluate | None
    evaluate_every: int | None
    stop: Stop | None
    adapt: Adapt | None
    log_every: int
    steps: int | None

    def evaluates(self, step: int) -> bool:
        """Whether a step is one after which to evaluate."""
        due = step == self.steps or (self.evaluate_every is not None and step % self.evaluate_every == 0)
        return self.evaluate is not None and due


class Run:
    """What happens around the steps of a run.

    Args:
        state: the first one, or the one from which the run goes on.
        position: where in the data it goes on; None for a run that begins.
        rules: what is done, and when.
        recorder: what is recorded.
        saved: what is on the disk.
        display: what people see.
        interrupted: tells the signal that has asked the run to end, or None.
    """

    def __init__(
        self,
        state: Any,
        position: Position | None,
        rules: Rules,
        recorder: Recorder,
        saved: Saved,
        display: Display,
        interrupted: Callable[[], Any],
    ) -> None:
        self._start, self._rules, self._recorder, self._saved = state, rules, recorder, saved
        self._display, self._interrupted = display, interrupted
        self._made = StepRecord(position.step, state, {}, None, position.epoch, position.batch) if position else None
        self._between_steps, self._best = False, saved.best
        self.stopped = ""
        """What `stop` has said."""

    @property
    def result(self) -> FitResult[Any]:
        """The newest state, and the history."""
        return FitResult(self._start if self._made is None else self._made.state, self._recorder.history)

    def resume(self) -> None:
        """Do what a run that was not interrupted has done after the step that was saved."""
        recorder, rules = self._recorder, self._rules
        if self._made is None:
            return
        self._between_steps = True
        due = self._reads(recorder.step)
        if due and recorder.settled != recorder.step:
            # An error has ended the run before it had evaluated, asked and adapted.
            self._settle(None)
        elif recorder.last_evaluation == recorder.step if rules.evaluate else due:
            self.stopped = rules.stop(recorder.history) if rules.stop and recorder.history else ""
        self._between_steps = False

    def after(self, made: StepRecord, records: Records) -> None:
        """Record, show, evaluate, ask, adapt and save, as far as it is time to."""
        self._made, self._between_steps = made, True
        self._recorder.add(made)
        if self._reads(made.step):
            self._recorder.read(made.state, self._display)
            self._settle(records)
        self._saved.save(self._made, every=True)
        self._between_steps = False

    def finish(self) -> None:
        """Read, evaluate and save what is left."""
        recorder, self._between_steps = self._recorder, True
        recorder.read(self.result.state, self._display)
        if recorder.last_evaluation != recorder.step and not self._leaving:
            self._evaluate()
            if self._rules.evaluate:
                self._adapt(None)
                self._require_best()
        if self._made is not None:
            self._saved.save(self._made)

    def rescue(self, error: BaseException) -> None:
        """Give an error what was trained, and save that if it is whole."""
        attach(error, self.result)
        try:
            self._recorder.read(self.result.state, self._display, check=False)
        except ConsumedError:
            return
        except Exception as other:
            note(error, f"fit: not all metrics could be recorded: {other!r}")
        # What fails within a step may have overwritten a part of its state, and data that fails has lost its position.
        if isinstance(error, Exception) and self._between_steps and self._made is not None:
            self._save(self._made, error)

    def _save(self, made: StepRecord, error: Exception) -> None:
        # What is not finite would push out what is, and what could not be saved cannot be saved now.
        if isinstance(error, NonFiniteError | CheckpointError):
            return
        try:
            self._saved.save(made)
        except Exception as other:
            note(error, f"fit: the state after step {made.step} could not be saved: {other!r}")

    def _settle(self, records: Records | None) -> None:
        """Evaluate, ask whether to stop, and adapt, if it is time to."""
        recorder, rules = self._recorder, self._rules
        evaluating = rules.evaluates(recorder.step) and not (recorder.step == rules.steps and self._leaving)
        if evaluating and recorder.last_evaluation != recorder.step:
            self._evaluate()
        if evaluating or not rules.evaluate:
            self.stopped = rules.stop(recorder.history) if rules.stop else ""
            self._adapt(records)
            self._require_best()
        recorder.settled = recorder.step

    def _evaluate(self) -> None:
        if self._rules.evaluate is not None:
            self._recorder.evaluated(self._rules.evaluate, *self.result[:1], self._display)

    def _adapt(self, records: Records | None) -> None:
        before = self.result.state
        state = self._rules.adapt(before, self._recorder.history) if self._rules.adapt else before
        if state is None:
            raise ComposeError("fit: adapt returned None; needs the state to go on with, which may be the one it got")
        if state is before:
            return
        if self._made is None:
            self._start = state
        else:
            self._made = self._made._replace(state=state) if records is None else records.send(state)

    def _require_best(self) -> None:
        """Check, once, that there is the metric by which the best checkpoint is known."""
        best, self._best = self._best, None
        if best is None or type(self._recorder.at(self._recorder.step).get(best)) in (bool, int, float):
            return
        values = column("Checkpoints(best=)", best, self._recorder.history)
        raise OptionError(f"Checkpoints(best=): {best!r} must be a number of each evaluation; found {values[-1]!r}")

    def _reads(self, step: int) -> bool:
        return step % self._rules.log_every == 0 or self._rules.evaluates(step) or self._saved.due(step)

    @property
    def _leaving(self) -> bool:
        """Whether the process is to end as soon as it has saved."""
        return self._saved.saves and self._interrupted() is not None


def attach(error: BaseException, result: FitResult[Any]) -> None:
    """Give an error its `result`; one of the user's own stays."""
    if not isinstance(getattr(error, "result", None), FitResult | None):
        return
    # Not setattr, which frozen dataclasses refuse.
    with suppress(Exception):
        BaseException.__setattr__(error, "result", result)


def note(error: BaseException, text: str) -> None:
    """Add a note to an error, as `add_note` does, which frozen dataclasses refuse."""
    with suppress(Exception):
        BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", []), text])
