"""A step of a run once more: what went into it, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from ftrain import tree
from ftrain.checkpoint import Checkpoints
from ftrain.checkpoint.checkpoints import LoadedCheckpoint
from ftrain.errors import CheckpointError, require_positive
from ftrain.step.step import Step
from ftrain.training.iterate import Position, iterate
from ftrain.training.oom_retry import SPLIT_METRIC, split_step
from ftrain.training.resume import history_of
from ftrain.types import Metrics, PyTree


def replay(
    step: Callable[..., Any], state: Any, data: Iterable[PyTree], checkpoints: Checkpoints, *, at: int
) -> tuple[Any, PyTree]:
    """Return ``(state, batch)`` as they went into one step of a run that `fit` has saved.

    The steps since the checkpoint before are made again, which gives the bits of the original. So a loss
    that is NaN, or a spike, can be looked at: ``step(*replay(step, state, data, checkpoints, at=1234))``. Steps that
    ``fit(on_oom="split")`` made in pieces are made in as many, if a checkpoint has been written since.

    Args:
        step: as `fit` had it, `state` and `data` too.
        state: as ``step.init()`` makes it; the steps begin with it where no checkpoint is early enough. It
            is not consumed.
        data: which keeps its position, or gives the same batches again.
        checkpoints: of the run.
        at: the number of the step, as the history has it; the state returned has made one less.

    Raises:
        OptionError: for a number that is not positive.
        CheckpointError: when there is nothing to begin from, or the data ends before.
    """
    require_positive("replay", "at", at)
    found = checkpoints.latest({"state": state}, before=at - 1)
    start, position = (
        _beginning(state, checkpoints, at) if found is None else (found.parts["state"], _position(found, "position"))
    )
    stepping, count = _as_then(step, checkpoints, found), position.step

    def until(state: Any, batch: PyTree) -> tuple[Any, Metrics]:
        nonlocal count
        count += 1
        return (state, {}) if count == at else stepping(count)(state, batch)

    for made in iterate(until, start, data, steps=at, position=position):
        if made.step == at:
            return made.state, made.batch
    raise CheckpointError(f"replay: the run began at step {position.step}, and {at} is not after it")


def _as_then(
    step: Callable[..., Any], checkpoints: Checkpoints, found: LoadedCheckpoint | None
) -> Callable[[int], Any]:
    """Return the step by its number: in as many pieces as the newest history says, which knows most."""
    if not isinstance(step, Step):
        return lambda number: step
    if found is None or found.step != checkpoints.steps()[-1]:
        found = checkpoints.latest()
    records = history_of(found) if found is not None else []
    splits = [(record["step"], record[SPLIT_METRIC]) for record in records if SPLIT_METRIC in record]
    whole = step.donating
    of = functools.cache(lambda pieces: split_step(whole, pieces) if pieces > 1 else whole)
    return lambda number: of(max([1, *(pieces for begins, pieces in splits if begins <= number)]))


def _beginning(state: Any, checkpoints: Checkpoints, at: int) -> tuple[Any, Position]:
    newest = checkpoints.latest({"state": state})
    if newest is None:
        raise CheckpointError(f"replay: there is no checkpoint in {checkpoints.directory}")
    began = _position(newest, "began")
    if int(getattr(state, "step", began.step)) != began.step:
        raise CheckpointError(
            f"replay: no checkpoint in {checkpoints.directory} is from before step {at}, and the state given is not "
            f"that of step {began.step}, where the run began; pass step.init() with the seed of the run"
        )
    # A copy, for a step that donates would consume what the caller keeps.
    return tree.clone(state), began


def _position(found: LoadedCheckpoint, name: str) -> Position:
    return Position(**found.run[name])
