"""Measure the memory and the time of a step with torch's profiler."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import profile

from ftrain import backends, tree
from ftrain._torch import end_profiling, is_profiling
from ftrain.errors import OptionError
from ftrain.step.flops import MOVEMENT, group_of
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

MEMORY = "[memory]"
"""The name of the profiler's events that allocate or free memory."""

LOG_LEVEL = "KINETO_LOG_LEVEL"
_ONE_PROFILER = threading.Lock()
"""Torch has one profiler for all threads."""


def measure(step: Step, state: TrainState, batch: PyTree) -> tuple[int, dict[str, float]]:
    """Return the bytes that a step allocates at its peak, and its seconds by group of operations.

    On a device the seconds are the time of its kernels; on a CPU the time of each operation without the operations that
    it calls. Runs the step twice, the second time under torch's profiler, and waits for the device. A step that donates
    consumes the state. Raises an OptionError if torch's profiler runs already.
    """
    device = tree.device_of(state.params)
    state, _ = step(state, batch)
    with _ONE_PROFILER:
        if is_profiling():
            raise OptionError(
                "anatomy, ladder, tune: the peak is measured with torch's profiler, and it runs already, so that this "
                "would end it; call them after it, or ft.anatomy(..., measure=False)"
            )
        try:
            with _quiet(), profile(profile_memory=True, acc_events=True) as profiler:
                step(state, batch)
                backends.of(device).synchronize()
        finally:
            end_profiling()
    return _peak(profiler, device), _seconds(profiler, on_host=device == tree.HOST)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which the profiler does not write to stderr, unless the environment sets its log level."""
    if LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = "6"
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL]


def _peak(profiler: Any, device: torch.device) -> int:
    """Return the largest number of bytes that were allocated on a device at one time under the profiler."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = peak = mapped_until = 0
    for event in events:
        if event.name() == "aten::from_file":
            mapped_until = event.end_ns()  # The profiler reports a mapped file, which allocates no memory.
        elif event.name() == MEMORY and event.device_type().name.lower() == device.type:
            allocated += event.nbytes() if event.start_ns() > mapped_until else 0
            peak = max(peak, allocated)
    return peak


def _seconds(profiler: Any, *, on_host: bool) -> dict[str, float]:
    """Return the seconds of torch's operations by group."""
    by_group: Counter[str] = Counter()
    for event in profiler.key_averages():
        microseconds = event.self_cpu_time_total if on_host else event.self_device_time_total
        name = event.key.removeprefix("aten::")
        if name != event.key:
            by_group[group_of(name) if microseconds else MOVEMENT] += microseconds / 1e6
    return dict(by_group)
