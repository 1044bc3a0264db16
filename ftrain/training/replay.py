"""`replay`: compute the state and the batch of one step of an earlier run again, with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ftrain import tree
from ftrain._torch.store import rank_and_size
from ftrain.checkpoint import Checkpoints
from ftrain.checkpoint.reading import LoadedCheckpoint
from ftrain.errors import CheckpointError, OptionError, require_positive, warn
from ftrain.step.step import Step
from ftrain.training.history import History
from ftrain.training.iterate import Position, iterate
from ftrain.training.metrics import read_metrics
from ftrain.training.oom_retry import SPLIT_METRIC, split_step
from ftrain.training.resume import history_of
from ftrain.types import Metrics, PyTree


def replay(
    step: Callable[..., Any], state: Any, data: Iterable[PyTree], checkpoints: Checkpoints, *, at: int
) -> tuple[Any, PyTree]:
    """Return the arguments ``(state, batch)`` of one step of a run that `fit` has saved.

    It makes the steps since the newest earlier checkpoint again, which gives the same bits. So a loss that is NaN, or a
    spike, can be examined: ``step(*replay(step, state, data, checkpoints, at=1234))``. Steps that
    ``fit(on_oom="split")`` made in pieces are made in the same number of pieces, if a checkpoint was written later.
    Changes of the state by ``fit(adapt=)`` since that checkpoint are not made again. A warning says if losses or
    scheduled values differ from the history.

    Args:
        step: the step of the run.
        state: the state that ``step.init()`` returns with the seed of the run; used if no checkpoint is early enough.
            It is not consumed.
        data: the data of the run. It must report its position, or give the same batches again.
        checkpoints: the checkpoints of the run.
        at: the number of the step, as in the history. The returned state is the one before it. The step may be later
            than the last one of the run.

    Raises:
        OptionError: `at` is not positive, or `checkpoints` is not a `Checkpoints`.
        CheckpointError: no checkpoint can be used, the state is not of the step at which the run began, or the run
            began after the step `at`.
    """
    require_positive("replay", "at", at)
    if not isinstance(checkpoints, Checkpoints):
        raise OptionError(f"replay: checkpoints is {checkpoints!r}; needs ft.Checkpoints(directory, every=...)")
    checkpoint = checkpoints.latest({"state": state}, before=at - 1)
    if checkpoint is None:
        start, position = _beginning(state, checkpoints, at)
    else:
        start, position = checkpoint.parts["state"], Position(**checkpoint.run["position"])
    records = _newest_records(checkpoints, checkpoint, state)
    replayed: list[dict[str, Any]] = []
    original_step = _original_steps(step, records)
    count = position.step
    compared = {"loss", *(step.optimizer.schedules if isinstance(step, Step) else ())}

    def step_until(state: Any, batch: PyTree) -> tuple[Any, Metrics]:
        nonlocal count
        count += 1
        if count == at:
            # The step itself is not made. Its rate shows whether `adapt` changed the state right before it.
            replayed.append({"step": count, **(step.scheduled_values(state) if isinstance(step, Step) else {})})
            return state, {}
        state, metrics = original_step(count)(state, batch)
        replayed.append({"step": count, **{name: metrics[name] for name in compared & metrics.keys()}})
        return state, metrics

    for record in iterate(step_until, start, data, steps=at, position=position):
        if record.step == at:
            _warn_of_difference(records, replayed)
            return record.state, record.batch
    raise CheckpointError(f"replay: the run began at step {position.step}; needs at= after it, found at={at}")


def _newest_records(checkpoints: Checkpoints, checkpoint: LoadedCheckpoint | None, state: Any) -> History:
    if checkpoint is None or checkpoint.step != checkpoints.steps()[-1]:
        checkpoint = checkpoints.latest({"state": state})
    return history_of(checkpoint) if checkpoint is not None else History()


def _warn_of_difference(records: History, replayed: Sequence[Mapping[str, Any]]) -> None:
    """Warn, on the first rank, if steps that were made again have other metrics than in the history."""
    original = {record["step"]: record for record in records if "seconds" in record}
    differences = [
        (record["step"], name, value, original[record["step"]][name])
        for record in read_metrics(replayed)
        for name, value in record.items()
        # As text, because NaN is not equal to itself.
        if repr(value) != repr(original.get(record["step"], {}).get(name, value))
    ]
    if differences and rank_and_size()[0] == 0:
        step, name, value, recorded = differences[0]
        warn(
            f"replay: {name} of step {step} is {value}, and {recorded} in the history, so the state that is returned "
            "may not be that of the run. Pass the step and the data of the run, on the same kind of machine. What "
            "fit(adapt=) did to the state after a checkpoint is not done again: save at each evaluation"
        )


def _original_steps(step: Callable[..., Any], records: History) -> Callable[[int], Any]:
    """Return ``number of a step -> function that makes it``, in the number of pieces that the history has for it."""
    if not isinstance(step, Step):
        return lambda number: step
    splits = [(record["step"], record[SPLIT_METRIC]) for record in records if SPLIT_METRIC in record]
    unsplit = step.donating
    split_into = functools.cache(lambda pieces: split_step(unsplit, pieces) if pieces > 1 else unsplit)

    def original_step(number: int) -> Step:
        return split_into(max([1, *(pieces for first_step, pieces in splits if first_step <= number)]))

    return original_step


def _beginning(state: Any, checkpoints: Checkpoints, at: int) -> tuple[Any, Position]:
    """Return a copy of the state and the position in the data with which the run began."""
    newest = checkpoints.latest({"state": state})
    if newest is None:
        raise CheckpointError(f"replay: there is no checkpoint in {checkpoints.directory}")
    began = Position(**newest.run["began"])
    if int(getattr(state, "step", began.step)) != began.step:
        raise CheckpointError(
            f"replay: no checkpoint in {checkpoints.directory} is from before step {at}, and the state is not "
            f"that of step {began.step}, where the run began; pass step.init() with the seed of the run"
        )
    # A copy, because a step that donates would consume the caller's state.
    return tree.clone(state), began
