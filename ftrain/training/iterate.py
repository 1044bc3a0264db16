"""`iterate`: the loop of a run over batches, and the position of the run in its data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ftrain import data as sources
from ftrain import tree
from ftrain.data.stateful import has_position
from ftrain.errors import (
    ComposeError,
    DataError,
    FtrainError,
    OptionError,
    log_on_first_rank,
    require_callable,
    require_positive,
    warn,
)
from ftrain.tree import device_off_host
from ftrain.tree.fast_flatten import Flattener
from ftrain.types import LossRanks, Metrics, PyTree, TrainState, consume, is_donatable, mark_donatable


class Position(NamedTuple):
    """The position of a run in its data."""

    step: int = 0
    """Steps done."""
    epoch: int = 0
    """Passes over the data that were completed."""
    batch: int = 0
    """Batches taken in the current pass."""
    data: Mapping[str, Any] | None = None
    """The position that the data itself reports; None if it reports none."""


class StepRecord(NamedTuple):
    """A step that was made, as `iterate` yields it."""

    step: int
    """Steps done, as the state counts them."""
    state: Any
    """The state after the step; the next step consumes it if it donates."""
    metrics: Metrics
    """The metrics that the step returned: tensors, which the device may still be computing."""
    batch: PyTree
    """The batch on the device; on the host if each rank copies only its rows to its device."""
    epoch: int = 0
    """Passes over the data that were completed."""
    batches: int = 0
    """Batches of this pass so far, this one included."""


def iterate(
    step: Callable[..., Any],
    state: Any,
    data: Iterable[PyTree],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    position: Position | None = None,
) -> Generator[StepRecord, Any, int | None]:
    """Run a step over data and yield a `StepRecord` after each step: the loop of `fit`, for loops of your own.

    ``send(state)`` replaces the state, and returns the record with the new one; if the step donates, the old state is
    consumed. After a loop that ended within a pass, data that reports its position continues from there.

    Args:
        step: a `Step`, or any function ``(state, batch) -> (state, metrics)``.
        state: the state to start from; steps are counted from its ``step``, or that of `position`.
        data: any iterable of batches; iterated again as often as needed, unless it is an iterator.
        steps: stop at this number of steps of the state.
        epochs: stop after this number of passes over the data, those before `position` included. Default, without
            `steps`: 1.
        position: the position to continue from, as returned by `position_of`. Default: the beginning.

    Returns:
        The number of completed passes over the data if the loop has made all of them; None if it ended after `steps`.

    Raises:
        ComposeError: `step` cannot be called, is a class or a module, is swapped with the state, or does not return a
            pair.
        OptionError: `steps` or `epochs` is not positive, or there are several epochs of an iterator.
        DataError: there is no batch, or the data is a single one (a dict or a tensor), or ends before `steps` is
            reached.
    """
    require_callable("iterate", step, state, "iterate(step, state, data)")
    _require_limits(data, steps, epochs)
    count = first = int(getattr(state, "step", position.step if position else 0))
    device = device_of_state(state)
    last_epoch = epochs if epochs is not None else (1 if steps is None else None)
    epoch, index, batches = _first_pass(data, position)
    resumed, empty_passes, flatten = position is not None, 0, Flattener()
    ranks = getattr(getattr(step, "loss", None), "ranks", None)
    # Then each rank copies only its rows of a batch to its device.
    takes_rows = isinstance(ranks, LossRanks) and ranks.whole_batches
    while (steps is None or count < steps) and (last_epoch is None or epoch < last_epoch):
        count_before_pass = count
        for host_batch in batches:
            batch = tree.as_tree(host_batch)
            if not takes_rows:
                batch = _to_device(batch, device, flatten)
            result = step(state, batch)
            try:
                state, metrics = result
            except (TypeError, ValueError) as error:
                raise ComposeError(
                    f"iterate: the step returned {type(result).__name__}; needs a pair (state, metrics)"
                ) from error
            # Without this, the state would stay in memory after `send` has replaced it.
            del result
            count, index = count + 1, index + 1
            record = StepRecord(count, state, metrics, batch, epoch, index)
            try:
                while (replacement := (yield record)) is not None:
                    state = _replace_state(state, replacement)
                    record = record._replace(state=state)
            except GeneratorExit:
                _keep_position(data)
                raise
            if steps is not None and count >= steps:
                _keep_position(data)
                return None
        # A pass without batches does not count as an epoch, except if the run has resumed at the end of this pass.
        empty_passes = empty_passes + 1 if count == count_before_pass else 0
        if not empty_passes or (resumed and index):
            epoch += 1
        index, batches, resumed = 0, data, False
        if empty_passes > 1 or (steps is not None and isinstance(data, Iterator) and epochs is None):
            raise DataError(_data_ended(count, steps, data, position, empty=count == first))
    return epoch if last_epoch is not None and epoch >= last_epoch else None


def _keep_position(data: Iterable[PyTree]) -> None:
    """Set data that reports its position to this position, from which it would otherwise not continue."""
    position = sources.position(data)
    if position is not None:
        sources.seek(data, position)


def _replace_state(old: Any, new: Any) -> Any:
    """Return the state `new`. If `old` may be donated, it is consumed, and the result may be donated too."""
    if not (isinstance(new, TrainState) and isinstance(old, TrainState) and is_donatable(old)) or new is old:
        return new
    unused = {id(leaf) for leaf in tree.leaves(old)}

    def owned(leaf: Any) -> Any:
        # Leaves that `old` does not have are copied: the caller may still use them. So is a leaf that `new` has twice,
        # such as an average that became the parameters: the next step would overwrite both.
        if id(leaf) not in unused:
            return leaf.clone()
        unused.discard(id(leaf))
        return leaf

    replaced = mark_donatable(tree.map(owned, new))
    consume(old)
    return replaced


def position_of(record: StepRecord, data: Iterable[PyTree]) -> Position:
    """Return the position of a run in its data after the step that `iterate` has just yielded."""
    return Position(record.step, record.epoch, record.batches, sources.position(data))


def _first_pass(data: Iterable[PyTree], position: Position | None) -> tuple[int, int, Iterable[PyTree]]:
    """Return the index of the first pass, the index of its first batch, and its remaining batches."""
    if position is None:
        return 0, 0, data
    batches = _rest_of_pass(data, position)
    if position.data is not None and position.batch and position.batch == _length(data):
        # Data may report either the end of this pass or the start of the next one.
        return position.epoch + 1, 0, batches
    return position.epoch, position.batch, batches


def _rest_of_pass(data: Iterable[PyTree], position: Position) -> Iterable[PyTree]:
    if position.data is not None:
        if sources.position(data) is None:
            raise DataError(
                f"fit: the run that is resumed had data that saves its position, and {type(data).__name__} has none; "
                "pass data of the same kind as before, or another directory for a new run"
            )
        sources.seek(data, dict(position.data))
        return data
    num_batches = num_batches_of(data)
    if num_batches is not None and num_batches < position.batch:
        warn(
            f"fit: the data has {num_batches} batches, and the run that is resumed had read {position.batch} in this "
            "pass; it continues with the next pass. Pass the same data for the same run"
        )
    elif (position.epoch or position.batch) and not isinstance(data, Sequence):
        reason = "had no position in the run that is resumed" if sources.position(data) else "has no position to save"
        skipped = f", so {position.batch} batches are read again and skipped" if position.batch else ""
        # A new object of data that shuffles starts with the order of its first pass, whatever the epoch is.
        condition = "all passes have the same order, not if it shuffles" if position.epoch else "the order is the same"
        warn(
            f"fit: {type(data).__name__} {reason}{skipped}; the run is the same only if {condition} "
            "(ftrain.data.loader saves its position)"
        )
    if isinstance(data, Sequence):
        return (data[index] for index in range(position.batch, len(data)))
    return itertools.islice(data, position.batch, None)


def num_batches_of(data: Iterable[PyTree]) -> int | None:
    """Return the number of batches in a pass over data that keeps no position; None if it is not known."""
    return None if has_position(data) or not isinstance(data, Sequence | DataLoader) else _length(data)


def _length(data: Any) -> int | None:
    """Return the number of batches in a pass over data; None if it is not known."""
    # The length of an iterable dataset is a guess, of which torch warns.
    if isinstance(getattr(data, "dataset", None), IterableDataset):
        return None
    with suppress(TypeError, NotImplementedError, FtrainError):  # The data has no length.
        return len(data)
    return None


def _to_device(batch: PyTree, device: torch.device, flatten: Flattener) -> PyTree:
    """Return a batch on a device; the same object if all of it is there already."""
    for leaf in flatten(batch)[0]:
        if not isinstance(leaf, Tensor) or leaf.device != device:
            return tree.to(batch, device)
    return batch


def device_of_state(state: Any) -> torch.device:
    """Return the device of the tensors of a state of any class; the host only if all of them are there."""
    return device_off_host(leaf for leaf in tree.leaves(state) if isinstance(leaf, Tensor))


def _require_limits(data: Iterable[PyTree], steps: int | None, epochs: int | None) -> None:
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None:
            require_positive("fit", name, value)
    if isinstance(data, Tensor) or (isinstance(data, Mapping) and data):
        raise DataError(f"fit: data is a {type(data).__name__}, one batch; needs an iterable of batches: [batch]")
    if not isinstance(data, Iterable):
        raise DataError(
            f"fit: data is {type(data).__name__}; needs an iterable of batches: pass a dataset to a DataLoader or to "
            "ft.data.loader(dataset, batch_size)"
        )
    if isinstance(data, itertools.cycle):
        log_on_first_rank(
            "fit: itertools.cycle repeats the batches of its first pass: a loader under it does not shuffle or augment "
            "again, and all batches stay in memory. Pass what it cycles over: steps= makes as many passes as it needs"
        )
    if epochs is not None and epochs > 1 and isinstance(data, Iterator):
        raise OptionError(
            f"fit: epochs={epochs} needs data that can be iterated again, and this is an iterator; pass the list or "
            "DataLoader behind it, or use steps="
        )


def _data_ended(
    count: int, steps: int | None, data: Iterable[PyTree], position: Position | None, *, empty: bool
) -> str:
    if empty and position is not None and position.batch and isinstance(data, Iterator):
        return (
            f"fit: the iterator has no batch after the {position.batch} that the run that is resumed had read; pass "
            "one that begins where that of the run began, and has more batches"
        )
    if empty:
        return "fit: the data has no batch; needs at least one (does drop_last leave out the only one?)"
    of_steps = "" if steps is None else f" of {steps}"
    return (
        f"fit: the data ended at step {count}{of_steps}, and cannot be iterated again; pass a list or DataLoader "
        "instead of an iterator, or fewer steps or epochs. The error's result holds what was trained"
    )
