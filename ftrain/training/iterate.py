"""The loop over batches, and where in the data it stands."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain import data as sources
from ftrain import tree
from ftrain.errors import DataError, OptionError, require_callable, require_positive
from ftrain.step.purity import as_tree
from ftrain.tree.fast_flatten import Flattener
from ftrain.types import Metrics, PyTree, TrainState, consume, is_own, own


class Position(NamedTuple):
    """Where a run stands in its data.

    Args:
        step: steps done.
        epoch: passes that were finished.
        batch: batches taken in the one that was not.
        data: the position that the data itself keeps; None when it keeps none.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    data: Mapping[str, Any] | None = None


class StepRecord(NamedTuple):
    """What `iterate` yields after each step.

    Args:
        step: steps done, as the state counts them.
        state: the state after the step; consumed by the next one when the step donates.
        metrics: of the step, as it returned them: nothing has waited for the device.
        batch: the batch, on the device.
        epoch: passes over the data that were finished before.
        batches: of this pass so far, this one included.
    """

    step: int
    state: Any
    metrics: Metrics
    batch: PyTree
    epoch: int = 0
    batches: int = 0


def iterate(
    step: Callable[..., Any],
    state: Any,
    data: Iterable[PyTree],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    position: Position | None = None,
) -> Generator[StepRecord, Any, None]:
    """Run a step over data and yield after each: the loop of `fit`, for those who write their own around it.

    ``send(state)`` to it returns the record with another state, from which it then goes on; the state that it had is
    consumed, if the step donates. When the loop is left within a pass, data that keeps a position goes on from there
    the next time.

    Args:
        step: a `Step`, or any function ``(state, batch) -> (state, metrics)``.
        state: the state to start from; steps are counted from its ``step``, or that of `position`.
        data: any iterable of batches; gone through again as often as it takes, if it can be.
        steps: stop when the state has made so many steps.
        epochs: stop after so many passes over the data, those before `position` included; one, when
            neither is given.
        position: where to go on, as `position_of` has told.

    Raises:
        ComposeError: when `step` cannot be called or is a class, or stands where the state does.
        OptionError: for numbers that are not positive, or several epochs of data that passes but once.
        DataError: when there is no batch, or the data ends before `steps` is reached.
    """
    require_callable("iterate", step, state, "iterate(step, state, data)")
    _require_limits(data, steps, epochs)
    count = int(getattr(state, "step", position.step if position else 0))
    device = device_of(state)
    last_epoch = epochs if epochs is not None else (1 if steps is None else None)
    epoch, index = (position.epoch, position.batch) if position else (0, 0)
    batches: Iterable[PyTree] = _from(data, position) if position else data
    resumed, idle, first, flatten = position is not None, 0, count, Flattener()
    while (steps is None or count < steps) and (last_epoch is None or epoch < last_epoch):
        before = count
        for given in batches:
            batch = _moved(as_tree(given), device, flatten)
            state, metrics = step(state, batch)
            count, index = count + 1, index + 1
            try:
                made = StepRecord(count, state, metrics, batch, epoch, index)
                while (sent := (yield made)) is not None:
                    state = _taken_over(sent, state)
                    made = made._replace(state=state)
            except GeneratorExit:
                _leave(data)
                raise
            if steps is not None and count >= steps:
                _leave(data)
                return
        # A pass that was finished before has nothing left to give, and counts; any other that gives nothing does not.
        idle = idle + 1 if count == before else 0
        epoch, index, batches = epoch + (not idle or resumed), 0, data
        resumed = False
        if idle > 1 or (steps is not None and isinstance(data, Iterator) and epochs is None):
            raise DataError(_ended(count, steps, empty=count == first))


def _leave(data: Iterable[PyTree]) -> None:
    """Make data that keeps a position go on from it the next time, instead of starting its pass over."""
    position = sources.position(data)
    if position is not None:
        sources.seek(data, position)


def _taken_over(new: Any, old: Any) -> Any:
    """Return a state that was made of one that nobody else has, as one that nobody else has."""
    if not (isinstance(new, TrainState) and isinstance(old, TrainState) and is_own(old)) or new is old:
        return new
    had = {id(leaf) for leaf in tree.leaves(old)}
    # Whoever made the new state may keep what he put into it.
    mine = own(tree.map(lambda leaf: leaf if id(leaf) in had else leaf.clone(), new))
    consume(old)
    return mine


def position_of(made: StepRecord, data: Iterable[PyTree]) -> Position:
    """Return where in its data a run stands after the step that `iterate` has just yielded."""
    return Position(made.step, made.epoch, made.batches, sources.position(data))


def _from(data: Iterable[PyTree], position: Position) -> Iterable[PyTree]:
    """The rest of the pass in which a run was."""
    if position.data is not None:
        sources.seek(data, dict(position.data))
        return data
    if position.batch and not isinstance(data, Sequence):
        warnings.warn(
            f"fit: {type(data).__name__} keeps no position, so that {position.batch} batches are read again and left "
            "out; they are the same only if it gives them in the same order (ftrain.data.loader keeps its position)",
            stacklevel=3,
        )
    return _without(data, position.batch)


def _without(data: Iterable[PyTree], count: int) -> Iterator[PyTree]:
    if isinstance(data, Sequence):
        yield from (data[index] for index in range(count, len(data)))
        return
    yield from (batch for index, batch in enumerate(data) if index >= count)


def _moved(batch: PyTree, device: torch.device, flatten: Flattener) -> PyTree:
    """`ftrain.tree.to`, which has nothing to do when the batch is there already."""
    if all(isinstance(leaf, Tensor) and leaf.device == device for leaf in flatten(batch)[0]):
        return batch
    return tree.to(batch, device)


def device_of(state: Any) -> torch.device:
    """Return where a state lives: counters and keys stay on the CPU, and what is trained may be elsewhere."""
    devices = [leaf.device for leaf in tree.leaves(state) if isinstance(leaf, Tensor)]
    return next((device for device in devices if device != tree.HOST), tree.HOST)


def _require_limits(data: Iterable[PyTree], steps: int | None, epochs: int | None) -> None:
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None:
            require_positive("fit", name, value)
    if isinstance(data, Mapping) and data:
        raise DataError(f"fit: data is a {type(data).__name__}, one batch; needs an iterable of batches: [batch]")
    if not isinstance(data, Iterable):
        raise DataError(
            f"fit: data is {type(data).__name__}; needs an iterable of batches: a data set goes into a DataLoader, or "
            "ft.data.loader(dataset, batch_size)"
        )
    if epochs is not None and epochs > 1 and isinstance(data, Iterator):
        raise OptionError(
            f"fit: epochs={epochs} needs data that can be gone through again, and this is an iterator; pass the "
            "list or DataLoader it was made from, or use steps="
        )


def _ended(count: int, steps: int | None, *, empty: bool) -> str:
    if empty:
        return "fit: the data has no batch; needs an iterable of at least one (is drop_last cutting the only one?)"
    return (
        f"fit: the data ended at step {count} of {steps}, and cannot be gone through again; pass a list or DataLoader "
        "instead of an iterator, or fewer steps. The error's result holds what was trained"
    )
