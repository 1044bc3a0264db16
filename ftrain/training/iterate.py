"""The loop over batches, and its position in the data."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain import data as sources
from ftrain import tree
from ftrain.errors import ComposeError, DataError, OptionError, require_callable, require_positive
from ftrain.step.purity import as_tree
from ftrain.tree.fast_flatten import Flattener
from ftrain.tree.tensors import device_off_host
from ftrain.types import LossRanks, Metrics, PyTree, TrainState, consume, is_donatable, mark_donatable


class Position(NamedTuple):
    """The position of a run in its data.

    Args:
        step: steps done.
        epoch: passes over the data that were completed.
        batch: batches taken in the current pass.
        data: the position that the data itself reports; None when it reports none.
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
        metrics: of the step, as it returned them: tensors on the device, which nothing has waited for.
        batch: the batch, on the device; as it came, if each rank copies its rows of it to its device.
        epoch: passes over the data that were completed.
        batches: batches of this pass so far, this one included.
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
) -> Generator[StepRecord, Any, int | None]:
    """Run a step over data and yield after each step: the loop of `fit`, to write your own around it.

    ``send(state)`` replaces the state and returns the record with it; the loop goes on from it. The state before is
    consumed, if the step donates. When the loop is left within a pass, data that reports its position goes on from
    there the next time.

    Args:
        step: a `Step`, or any function ``(state, batch) -> (state, metrics)``.
        state: the state to start from; steps are counted from its ``step``, or that of `position`.
        data: any iterable of batches; iterated again as often as needed, unless it is an iterator.
        steps: stop when the state has made so many steps.
        epochs: stop after so many passes over the data, those before `position` included. Default, without `steps`: 1.
        position: where to go on, as returned by `position_of`. Default: the beginning.

    Returns:
        The passes over the data that were completed, when the loop ends because there are no more; None after `steps`.

    Raises:
        ComposeError: when `step` cannot be called, is a class or a module, or stands where the state does, and when it
            returns no pair.
        OptionError: for numbers that are not positive, or several epochs of an iterator.
        DataError: when there is no batch, or the data ends before `steps` is reached.
    """
    require_callable("iterate", step, state, "iterate(step, state, data)")
    _require_limits(data, steps, epochs)
    count = first = int(getattr(state, "step", position.step if position else 0))
    device = device_of_state(state)
    last_epoch = epochs if epochs is not None else (1 if steps is None else None)
    epoch, index = (position.epoch, position.batch) if position else (0, 0)
    batches: Iterable[PyTree] = _rest_of_pass(data, position) if position else data
    resumed, empty_passes, flatten = position is not None, 0, Flattener()
    ranks = getattr(getattr(step, "loss", None), "ranks", None)
    takes_rows = isinstance(ranks, LossRanks) and ranks.whole_batches  # And copies only these to the device.
    while (steps is None or count < steps) and (last_epoch is None or epoch < last_epoch):
        count_before_pass = count
        for host_batch in batches:
            batch = as_tree(host_batch)
            if not takes_rows:
                batch = _to_device(batch, device, flatten)
            result = step(state, batch)
            try:
                state, metrics = result
            except (TypeError, ValueError) as error:
                raise ComposeError(
                    f"iterate: the step returned {type(result).__name__}; needs a pair (state, metrics)"
                ) from error
            # Or it would keep this state when another one is sent.
            del result
            count, index = count + 1, index + 1
            try:
                record = StepRecord(count, state, metrics, batch, epoch, index)
                while (replacement := (yield record)) is not None:
                    state = _replace_state(state, replacement)
                    record = record._replace(state=state)
            except GeneratorExit:
                _keep_position(data)
                raise
            if steps is not None and count >= steps:
                _keep_position(data)
                return None
        # An empty pass does not count as an epoch, unless a run resumes at the end of a pass, of which nothing is left.
        empty_passes = empty_passes + 1 if count == count_before_pass else 0
        if not empty_passes or (resumed and index):
            epoch += 1
        index, batches, resumed = 0, data, False
        if empty_passes > 1 or (steps is not None and isinstance(data, Iterator) and epochs is None):
            raise DataError(_data_ended(count, steps, empty=count == first))
    return epoch if last_epoch is not None and epoch >= last_epoch else None


def _keep_position(data: Iterable[PyTree]) -> None:
    """Make data that reports its position go on from it the next time, instead of starting its pass over."""
    position = sources.position(data)
    if position is not None:
        sources.seek(data, position)


def _replace_state(old: Any, new: Any) -> Any:
    """Return `new`, in memory that nothing else uses if `old` had such memory; `old` is then consumed."""
    if not (isinstance(new, TrainState) and isinstance(old, TrainState) and is_donatable(old)) or new is old:
        return new
    shared = {id(leaf) for leaf in tree.leaves(old)}
    # Other leaves are copied: whoever made the new state may still use them.
    replaced = mark_donatable(tree.map(lambda leaf: leaf if id(leaf) in shared else leaf.clone(), new))
    consume(old)
    return replaced


def position_of(record: StepRecord, data: Iterable[PyTree]) -> Position:
    """Return the position of a run in its data after the step that `iterate` has just yielded."""
    return Position(record.step, record.epoch, record.batches, sources.position(data))


def _rest_of_pass(data: Iterable[PyTree], position: Position) -> Iterable[PyTree]:
    if position.data is not None:
        sources.seek(data, dict(position.data))
        return data
    if isinstance(data, Sequence):
        return (data[index] for index in range(position.batch, len(data)))
    if position.batch:
        keeps = "kept no position in the run that is resumed" if sources.position(data) else "keeps no position"
        warnings.warn(
            f"fit: {type(data).__name__} {keeps}, so that {position.batch} batches are read again and "
            "skipped; the run is the same only if they come in the same order (ftrain.data.loader keeps its position)",
            stacklevel=3,
        )
    return itertools.islice(data, position.batch, None)


def _to_device(batch: PyTree, device: torch.device, flatten: Flattener) -> PyTree:
    """Return a batch on a device; itself, if all of it is there already."""
    for leaf in flatten(batch)[0]:
        if not isinstance(leaf, Tensor) or leaf.device != device:
            return tree.to(batch, device)
    return batch


def device_of_state(state: Any) -> torch.device:
    """Return the device of the parameters of any state, also of one whose parameters are not known by name."""
    return device_off_host(leaf for leaf in tree.leaves(state) if isinstance(leaf, Tensor))


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
            f"fit: epochs={epochs} needs data that can be iterated again, and this is an iterator; pass the list or "
            "DataLoader it was made from, or use steps="
        )


def _data_ended(count: int, steps: int | None, *, empty: bool) -> str:
    if empty:
        return "fit: the data has no batch; needs an iterable of at least one (is drop_last cutting the only one?)"
    return (
        f"fit: the data ended at step {count} of {steps}, and cannot be iterated again; pass a list or DataLoader "
        "instead of an iterator, or fewer steps. The error's result holds what was trained"
    )
