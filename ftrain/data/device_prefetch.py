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
from ftrain.data.stateful import position, seek
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
        """Return the number of batches in an epoch; raises as `len` of the data does."""
        return len(self._data)  # type: ignore[arg-type]

    @property
    def num_dropped(self) -> int:
        """The number of samples that an epoch of a loader leaves out; 0 if it is not known."""
        return getattr(self._data, "num_dropped", 0)

    def __iter__(self) -> Iterator[PyTree]:
        if self._epoch_start is not None:
            # This epoch is unfinished, but reading ahead may have finished it in `data`.
            seek(self._data, self._epoch_start)
        self._epoch_start = self._position = position(self._data)
        return self._batches()

    def _batches(self) -> Iterator[PyTree]:
        stream = torch.Stream(self._device) if backends.of(self._device).pinned_memory else None

        def copied(batch: PyTree) -> _Copy:
            return _Copy(*_copy(tree.as_tree(batch), self._device, stream), position(self._data))

        ahead, queue = map(copied, self._data), deque[_Copy]()
        failure: Exception | None = None
        is_over = False
        while True:
            try:
                if not is_over:
                    queue.extend(itertools.islice(ahead, self._depth + 1 - len(queue)))
            except Exception as error:
                # Raised after the earlier batches, which are good.
                failure = error
            # Not read again: iterators that start over after their end would make one endless epoch.
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position of `data`; raises as `seek` does."""
        seek(self._data, state)
        self._epoch_start = self._position = None


class _Copy(NamedTuple):
    """A batch on the device, the event of its copy, and the position of the data after it."""

    batch: PyTree
    copied: torch.Event | None
    position: dict[str, Any] | None

    def wait(self) -> PyTree:
        """Return the batch. The current stream waits for its copy, and its memory is kept until that stream is done."""
        if self.copied is None:
            return self.batch
        current = torch.accelerator.current_stream(self.copied.device)
        current.wait_event(self.copied)
        _each_tensor(lambda tensor: tensor.record_stream(current), self.batch)
        return self.batch


def _copy(batch: PyTree, device: torch.device, stream: torch.Stream | None) -> tuple[PyTree, torch.Event | None]:
    """Return a tree on a device, and the event of the copy if it is on a separate stream.

    The host waits for the copy if the data has pinned the batch itself: it may fill that memory again.
    """
    if stream is None:
        # Tensors on the device are copied too: the data may fill them again for the batches that are read ahead.
        return _each_tensor(lambda tensor: tensor.to(device, non_blocking=True, copy=True), batch), None
    with_own_memory = _each_tensor(_pin, batch)
    with stream:
        copy = _each_tensor(lambda tensor: tensor.to(device, non_blocking=True), with_own_memory)
    copied = stream.record_event()
    if any(isinstance(leaf, Tensor) and leaf.is_pinned() for leaf in tree.leaves(batch)):
        copied.synchronize()
    return copy, copied


def _each_tensor(function: Callable[[Tensor], Any], batch: PyTree) -> PyTree:
    """Apply a function to every tensor that is a leaf, and not to those of other objects, which `tree.to` moves.

    What objects move by themselves is unknown to `_Copy.wait`, which must tell the allocator what is in use.
    """
    values, spec = tree.flatten(batch, is_leaf=lambda node: isinstance(node, PackedSequence))
    return tree.unflatten(spec, [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in values])


def _pin(tensor: Tensor) -> Tensor:
    """Return a tensor of the host in pinned memory, and one of a device as a copy, which nothing else may change."""
    if tensor.device != tree.HOST:
        return tensor.clone()
    return tensor if tensor.is_pinned() else tensor.pin_memory()
