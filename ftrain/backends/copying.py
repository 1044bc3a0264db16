"""Copies between host and device on a separate stream, for devices with streams like those of `torch.cuda`.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEPTH = 4
"""The most copies to the host at one time, since each of them keeps its source alive."""


class StreamCopier:
    """A `Copier` with a stream of its own."""

    ahead = True

    def __init__(self, module: Any) -> None:
        self._module = module
        self._stream = module.Stream()
        # Sources of copies to the host, and the events that follow the copies. The allocator may reuse the memory of a
        # source only after the current stream has waited for its event.
        self._in_flight: deque[tuple[Tensor, Any]] = deque()

    def out(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` to the host after the work that is queued so far; `target` is complete after `wait`."""
        current = self._module.current_stream()
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        self._in_flight.append((source, done))
        self._release_sources(DEPTH)

    def _release_sources(self, limit: int) -> None:
        """Make the current stream wait for all copies but the newest `limit`, and free the sources of those copies."""
        while len(self._in_flight) > limit:
            _, done = self._in_flight.popleft()
            self._module.current_stream().wait_event(done)

    def back(self, source: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Start a copy to the device; return a function that waits for the copy and returns it."""
        self._release_sources(0)
        with self._module.stream(self._stream):
            copy = source.to(device, non_blocking=True)
            done = self._stream.record_event()

        def wait_for_copy() -> Tensor:
            current = self._module.current_stream()
            current.wait_event(done)
            # The memory belongs to the copying stream, which must not reuse it while this stream reads it.
            copy.record_stream(current)
            return copy

        return wait_for_copy

    def wait(self) -> None:
        """Wait for all copies to the host."""
        self._stream.synchronize()
        self._in_flight.clear()
