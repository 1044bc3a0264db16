"""A step as the profiler of torch sees it: bytes that were really taken, and time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ftrain import backends, tree
from ftrain.step.flops import MOVEMENT, group_of
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

MEMORY = "[memory]"
QUIET = "KINETO_LOG_LEVEL", "6"


@dataclass(frozen=True)
class Measured:
    """What was measured of a step.

    Args:
        more: bytes at most beyond those of before.
        profiler: that has seen it.
    """

    more: int
    profiler: Any

    @property
    def seconds(self) -> dict[str, float]:
        """Time by group of operations: of kernels on a device, and on a CPU without those that they call."""
        found: Counter[str] = Counter()
        for event in self.profiler.key_averages():
            spent = event.self_device_time_total or event.self_cpu_time_total
            name = event.key.removeprefix("aten::")
            if name != event.key:
                found[group_of(name) if spent else MOVEMENT] += spent / 1e6
        return dict(found)


def measure(step: Step, state: TrainState, batch: PyTree) -> Measured:
    """Run a step twice, the second time under the profiler of torch; waits for the device.

    Args:
        step: the step; one that donates consumes the state.
        state: where it begins.
        batch: a batch.
    """
    device = tree.device_of(state.params)
    state, _ = step(state, batch)
    with _quiet(), profile(activities=_activities(device), profile_memory=True, acc_events=True) as profiler:
        step(state, batch)
        backends.of(device).synchronize()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == MEMORY]
    events = [event for event in events if event.device_type().name.lower() == device.type]
    return Measured(_most(events), profiler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the profiler keep its remarks to itself, unless it was told what to say."""
    name, level = QUIET
    told = name in os.environ
    os.environ.setdefault(name, level)
    try:
        yield
    finally:
        if not told:
            del os.environ[name]


def _activities(device: torch.device) -> list[ProfilerActivity]:
    other = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.CPU)
    return list(dict.fromkeys([ProfilerActivity.CPU, other]))


def _most(events: list[Any]) -> int:
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
