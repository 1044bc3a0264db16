"""Copies between host and device on a stream of their own, for devices whose module has streams as `torch.cuda` has.

The names are those of `torch.cuda` (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams), which the
modules of other vendors repeat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEPTH = 4
"""Copies to the host that may be under way: what is copied is alive until the device waits for the oldest."""


class Streams:
    """A stream for copies.

    Args:
        module: of the device, ``torch.<name>``.
    """

    ahead = True
    """Whether copies go on while the device computes."""

    def __init__(self, module: Any) -> None:
        self._module, self._stream = module, module.Stream()
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    def out(self, source: Tensor, target: Tensor) -> None:
        """Copy to the host what the work that is queued so far makes; `target` is there after `wait`."""
        current = self._module.current_stream()
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        self._leaving.append((source, done))
        self._settle(DEPTH)

    def _settle(self, most: int) -> None:
        """Let go of what was copied, when the work that is queued from now on may write its memory."""
        while len(self._leaving) > most:
            _, done = self._leaving.popleft()
            self._module.current_stream().wait_event(done)

    def back(self, source: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Begin to copy to the device; what is returned gives the tensor, to be called before it is used."""
        self._settle(0)
        with self._module.stream(self._stream):
            copy = source.to(device, non_blocking=True)
            done = self._stream.record_event()

        def arrived() -> Tensor:
            current = self._module.current_stream()
            current.wait_event(done)
            copy.record_stream(current)
            return copy

        return arrived

    def wait(self) -> None:
        """Wait until all that was copied to the host is there."""
        self._stream.synchronize()
        self._leaving.clear()
