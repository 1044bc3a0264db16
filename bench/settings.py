"""The settings of a run: the device, how long it may take, and which entrants it leaves out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.tasks import Task


@dataclass
class Settings:
    """The settings of a run.

    Args:
        device: the device to train on.
        rounds: number of turns of each entrant; cases of long steps use a fraction of it.
        seconds: about how long a turn takes.
        tiny: use tiny problems, to test that all entrants run.
        smoke: run everything once. Trainers then run in one case only, since each needs seconds to start.
        compile_backend: the backend of `torch.compile` and `ft.compiled`.
        full: also run what takes long: all entrants in the slow cases, and graphs that compile for minutes.
        peers: whether to time other libraries.
        deadline: the value of `time.monotonic()` after which no more entrant is started.
        ceilings: measured TFLOP/s of matrix products by precision; empty until they are measured.
    """

    device: str = "cpu"
    rounds: int = 30
    seconds: float = 0.05
    tiny: bool = False
    smoke: bool = False
    full: bool = False
    compile_backend: str = "inductor"
    peers: bool = True
    deadline: float = float("inf")
    ceilings: dict[str, float] = field(default_factory=dict)

    def task(self, problem: str, precision: str = "fp32") -> Task:
        """Return the task of training a problem on the device of this run."""
        return Task(problem, precision, self.device, self.tiny, self.compile_backend)

    def out_of_time(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def scaled_rounds(self, fraction: float) -> int:
        """Return this fraction of the rounds, but at least five, or all if there are fewer."""
        return max(min(5, self.rounds), round(self.rounds * fraction))

    def limit(self, entrants: Sequence[Any]) -> Sequence[Any]:
        """Return all entrants in a full run, else the first three (two in a smoke test), where each needs a process."""
        if self.full:
            return entrants
        return entrants[:2] if self.smoke else entrants[:3]

    @property
    def torch_device(self) -> torch.device:
        """The device as a `torch.device`."""
        return torch.device(self.device)
