"""Replay: the state and the batch of one step of an earlier run, bitwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from ftrain import tree
from ftrain.checkpoint import Checkpoints
from ftrain.checkpoint.reading import LoadedCheckpoint
from ftrain.errors import CheckpointError, require_positive
from ftrain.step.step import Step
from ftrain.training.iterate import Position, iterate
from ftrain.training.oom_retry import SPLIT_METRIC, split_step
from ftrain.training.resume import history_of
from ftrain.types import Metrics, PyTree


def replay(
    step: Callable[..., Any], state: Any, data: Iterable[PyTree], checkpoints: Checkpoints, *, at: int
) -> tuple[Any, PyTree]:
    """Return the arguments ``(state, batch)`` of one step of a run that `fit` has saved.

    The steps since the newest checkpoint before it are made again, which gives the same bits. So a loss that is NaN, or
    a spike, can be examined: ``step(*replay(step, state, data, checkpoints, at=1234))``. Steps that
    ``fit(on_oom="split")`` made in pieces are made in the same number of pieces, if a checkpoint was written later.

    Args:
        step: the step of the run.
        state: the state that ``step.init()`` returns with the seed of the run; used if no checkpoint is early enough.
            It is not consumed.
        data: the data of the run; it reports its position, or gives the same batches again.
        checkpoints: the checkpoints of the run.
        at: the number of the step, as in the history; the state returned has made one step less. It may be a later step
            than the last one of the run.

    Raises:
        OptionError: for a number that is not positive.
        CheckpointError: when no checkpoint can be used, the state is not the one that the run began with, or the run
            began after that step.
    """
    require_positive("replay", "at", at)
    checkpoint = checkpoints.latest({"state": state}, before=at - 1)
    if checkpoint is None:
        start, position = _beginning(state, checkpoints, at)
    else:
        start, position = checkpoint.parts["state"], Position(**checkpoint.run["position"])
    step_at, count = _original_steps(step, checkpoints, checkpoint), position.step

    def until(state: Any, batch: PyTree) -> tuple[Any, Metrics]:
        nonlocal count
        count += 1
        return (state, {}) if count == at else step_at(count)(state, batch)

    for record in iterate(until, start, data, steps=at, position=position):
        if record.step == at:
            return record.state, record.batch
    raise CheckpointError(f"replay: the run began at step {position.step}; needs at= after it, found at={at}")


def _original_steps(
    step: Callable[..., Any], checkpoints: Checkpoints, checkpoint: LoadedCheckpoint | None
) -> Callable[[int], Any]:
    """Return ``number of a step -> step``, split into the number of pieces that the newest history has for it."""
    if not isinstance(step, Step):
        return lambda number: step
    if checkpoint is None or checkpoint.step != checkpoints.steps()[-1]:
        checkpoint = checkpoints.latest()
    records = history_of(checkpoint) if checkpoint is not None else []
    splits = [(record["step"], record[SPLIT_METRIC]) for record in records if SPLIT_METRIC in record]
    unsplit = step.donating
    split_into = functools.cache(lambda pieces: split_step(unsplit, pieces) if pieces > 1 else unsplit)
    return lambda number: split_into(max([1, *(pieces for first_step, pieces in splits if first_step <= number)]))


def _beginning(state: Any, checkpoints: Checkpoints, at: int) -> tuple[Any, Position]:
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
