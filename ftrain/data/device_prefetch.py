"""Copies batches to a device ahead of their use."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ftrain import backends, tree
from ftrain.data.stateful import position, seek, start_position
from ftrain.errors import DataError, require_positive
from ftrain.types import PyTree


def prefetch(data: Iterable[PyTree], device: torch.device | str, depth: int = 2) -> DevicePrefetcher:
    """Return the same batches on a device, copied there while earlier ones are in use.

    On a device that reads pinned memory faster, batches are copied into pinned memory and from there on a separate
    stream. The position is that after the batches that were yielded, not those that were read ahead.

    Args:
        data: an iterable of batches.
        device: the device to copy them to.
        depth: the number of batches that are read ahead.

    Raises:
        OptionError: if `depth` is not a positive integer.
        DataError: if `data` is a single batch, or cannot be iterated.
        DeviceError: if the device is unknown or unavailable.

    >>> [int(batch["x"]) for batch in prefetch([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}], "cpu")]
    [1, 2]
    """
    require_positive("prefetch", "depth", depth)
    if isinstance(data, Mapping | Tensor) or not isinstance(data, Iterable):
        raise DataError(
            f"prefetch: data is a {type(data).__name__}; needs an iterable of batches, such as [batch] or "
            "ft.data.loader(dataset, batch_size)"
        )
    return DevicePrefetcher(data, backends.resolve(device), depth)


class DevicePrefetcher:
    """An iterable made by `prefetch`.

    After an unfinished epoch, ``iter()`` starts the same epoch again if `data` has a position.
    """

    def __init__(self, data: Iterable[PyTree], device: torch.device, depth: int) -> None:
        self._data, self._device, self._depth = data, device, depth
        self._position: dict[str, Any] | None = None
        self._epoch_start: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch; raises the error of ``len(data)``."""
        return len(self._data)  # type: ignore[arg-type]

    @property
    def num_dropped(self) -> int:
        """The number of samples that an epoch of a loader leaves out; 0 if it is not known."""
        return getattr(self._data, "num_dropped", 0)

    def __iter__(self) -> Iterator[PyTree]:
        if self._epoch_start is not None:
            # This epoch is unfinished, but reading ahead may have finished it in `data`.
            seek(self._data, self._epoch_start)
        self._epoch_start = self._position = start_position(self._data)
        return self._batches()

    def _batches(self) -> Iterator[PyTree]:
        """Yield the batches of an epoch, and read `depth` batches ahead. Raises the errors of the data."""
        stream = torch.Stream(self._device) if backends.of(self._device).pinned_memory else None

        def start_copy(batch: PyTree) -> _Copy:
            return _Copy(*_copy(tree.as_tree(batch), self._device, stream), position(self._data))

        copies, queue = map(start_copy, self._data), deque[_Copy]()
        failure: Exception | None = None
        is_over = False
        while True:
            try:
                if not is_over:
                    queue.extend(itertools.islice(copies, self._depth + 1 - len(queue)))
            except Exception as error:
                # It is raised after the batches in the queue, which are good.
                failure = error
            # The data is not read after its end: an iterator that then starts again would make one endless epoch.
            is_over = len(queue) <= self._depth
            if not queue:
                break
            copy = queue.popleft()
            self._position = copy.position
            yield copy.wait()
        if failure is not None:
            raise failure
        self._epoch_start = self._position = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position of `data` after the batches that were yielded; None if it has no position."""
        return position(self._data) if self._position is None else self._position

    def start_dict(self) -> dict[str, Any] | None:
        """Return the position at which the next ``iter()`` starts; None if `data` has no position."""
        return start_position(self._data) if self._epoch_start is None else self._epoch_start

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position of `data`; raises the errors of `seek`."""
        seek(self._data, state)
        self._epoch_start = self._position = None


class _Copy(NamedTuple):
    """A batch on the device, the event after its copy (None if no stream copies it), and the position after it."""

    batch: PyTree
    copied: torch.Event | None
    position: dict[str, Any] | None

    def wait(self) -> PyTree:
        """Return the batch, after making the current stream wait for its copy; the host does not wait.

        The allocator keeps the memory of the batch until the work of the current stream is done.
        """
        if self.copied is None:
            return self.batch
        current = torch.accelerator.current_stream(self.copied.device)
        current.wait_event(self.copied)
        _map_tensors(lambda tensor: tensor.record_stream(current), self.batch)
        return self.batch


def _copy(batch: PyTree, device: torch.device, stream: torch.Stream | None) -> tuple[PyTree, torch.Event | None]:
    """Return a batch on a device, and the event after its copy if a separate stream makes it.

    The host waits for the copy if the batch is in pinned memory already: the data may fill that memory again.
    """
    if stream is None:
        # Tensors on the device are copied too: the data may write the batches that are read ahead to the same tensors.
        return _map_tensors(lambda tensor: tensor.to(device, non_blocking=True, copy=True), batch), None
    pinned = _map_tensors(_pin, batch)
    with stream:
        copy = _map_tensors(lambda tensor: tensor.to(device, non_blocking=True), pinned)
    copied = stream.record_event()
    if any(isinstance(leaf, Tensor) and leaf.is_pinned() for leaf in tree.leaves(batch)):
        copied.synchronize()
    return copy, copied


def _map_tensors(function: Callable[[Tensor], Any], batch: PyTree) -> PyTree:
    """Return a batch with a function applied to every leaf that is a tensor; other leaves stay as they are.

    Unlike `tree.to`, it does not move objects with a method ``to``: `_Copy.wait` could not record which tensors they
    hold.
    """
    values, spec = tree.flatten(batch, is_leaf=lambda node: isinstance(node, PackedSequence))
    return tree.unflatten(spec, [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in values])


def _pin(tensor: Tensor) -> Tensor:
    """Return a tensor of the host in pinned memory; for one of a device a copy, which the data cannot change."""
    if tensor.device != tree.HOST:
        return tensor.clone()
    return tensor if tensor.is_pinned() else tensor.pin_memory()
