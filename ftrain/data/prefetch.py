"""Batches ahead of time, on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.data.stateful import position, seek
from ftrain.errors import ComposeError, DataError, require_positive
from ftrain.step.purity import as_tree
from ftrain.types import PyTree


def prefetch(data: Iterable[PyTree], device: torch.device | str, depth: int = 2) -> Prefetch:
    """Return the same batches on a device, some of which are on their way there while the one before is worked on.

    Where the device reads page-locked memory faster, batches are copied into such memory and from there on a stream of
    their own. Its position is that of the batches it has yielded, and not of those it has read ahead.

    Args:
        data: any iterable of batches.
        device: where they go.
        depth: how many are read ahead.

    Raises:
        OptionError: for a `depth` that is no positive number.
        DataError: when `data` is no iterable.
        DeviceError: for an unknown or unavailable device.

    >>> [int(batch["x"]) for batch in prefetch([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}], "cpu")]
    [1, 2]
    """
    require_positive("prefetch", "depth", depth)
    if not isinstance(data, Iterable):
        raise DataError(f"prefetch: data is {type(data).__name__}; needs an iterable of batches")
    return Prefetch(data, backends.resolve(device), depth)


class Prefetch:
    """Batches made by `prefetch`; a pass that is left unfinished starts over where it began, if `data` can."""

    def __init__(self, data: Iterable[PyTree], device: torch.device, depth: int) -> None:
        self._data, self._device, self._depth = data, device, depth
        self._at: dict[str, Any] | None = None
        self._begun: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches in a pass.

        Raises:
            ComposeError: where `data` has no length.
        """
        if not isinstance(self._data, Sized):
            raise ComposeError(f"len(prefetch): {type(self._data).__name__} has no length; count in steps instead")
        return len(self._data)

    def __iter__(self) -> Iterator[PyTree]:
        if self._begun is not None:
            # Reading ahead may have taken the data further than its own idea of a pass that was left.
            seek(self._data, self._begun)
        self._begun = self._at = position(self._data)
        return self._passing()

    def _passing(self) -> Iterator[PyTree]:
        given, copy = iter(self._data), _Copy(self._device)
        ahead: deque[_Ahead] = deque()
        while True:
            while len(ahead) <= self._depth and not (ahead and ahead[-1].last):
                ahead.append(self._read(given, copy))
            first = ahead.popleft()
            if first.error is not None:
                raise first.error
            if first.last:
                break
            self._at = first.after
            yield first.ready()
        self._begun = self._at = None

    def _read(self, given: Iterator[PyTree], copy: _Copy) -> _Ahead:
        try:
            batch = next(given)
        except StopIteration:
            return _Ahead(last=True)
        except Exception as error:
            # Kept until its turn: the batches before it are good.
            return _Ahead(last=True, error=error)
        return _Ahead(*copy(as_tree(batch)), after=position(self._data))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position of `data` after the batches that were yielded; None where it has none."""
        return position(self._data) if self._at is None else self._at

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position of `data`.

        Raises:
            DataError: when it keeps none, or the position does not fit.
        """
        seek(self._data, state)
        self._begun = self._at = None


@dataclass
class _Ahead:
    """A batch on its way, or the end."""

    batch: PyTree = None
    copied: Any = None
    after: dict[str, Any] | None = None
    last: bool = False
    error: Exception | None = None

    def ready(self) -> PyTree:
        """Let what is done with the batch wait for its copy, and the memory be kept until it is done."""
        if self.copied is None:
            return self.batch
        current = torch.accelerator.current_stream(self.copied.device)
        current.wait_event(self.copied)
        tree.map(lambda leaf: leaf.record_stream(current) if isinstance(leaf, Tensor) else None, self.batch)
        return self.batch


class _Copy:
    """Copies trees to a device, on a stream of its own where that is of use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if backends.of(device).pinned_memory else None

    def __call__(self, batch: PyTree) -> tuple[PyTree, Any]:
        if self._stream is None:
            return tree.to(batch, self._device), None
        pinned = tree.map(_pinned, batch)
        with self._stream:
            moved = tree.to(pinned, self._device)
        return moved, self._stream.record_event()


def _pinned(leaf: Any) -> Any:
    waiting = isinstance(leaf, Tensor) and leaf.device == tree.HOST and not leaf.is_pinned()
    return leaf.pin_memory() if waiting else leaf
