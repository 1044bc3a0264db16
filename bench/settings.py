"""How the bench runs: where, how long, and what it leaves out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.tasks import Task


@dataclass
class Settings:
    """The options of a run.

    Args:
        device: where to train.
        rounds: turns that each entrant takes; cases of long steps take a share of them.
        seconds: about how long a turn lasts.
        tiny: problems of no size, to see whether everything runs.
        smoke: do everything once; trainers then race in one case only, since each start takes seconds.
        compile_backend: of `torch.compile` and `ft.compiled`.
        full: also what makes a run long: everyone in the slow cases, and graphs that take minutes to compile.
        peers: whether other libraries race.
        deadline: the clock's time after which no more entrant is started.
        ceilings: measured TFLOP/s of matrix products by precision; empty until they are.
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
        """A problem on the device of this run."""
        return Task(problem, precision, self.device, self.tiny, self.compile_backend)

    def late(self) -> bool:
        """Whether the time of the run is used up."""
        return time.monotonic() > self.deadline

    def share(self, part: float) -> int:
        """A part of the rounds, and five at least where there are that many."""
        return max(min(5, self.rounds), round(self.rounds * part))

    def some(self, entrants: Sequence[Any]) -> Sequence[Any]:
        """All of them in a full run, else the first three, and in a smoke test two, where each costs a process."""
        return entrants if self.full else entrants[: 2 if self.smoke else 3]

    @property
    def place(self) -> torch.device:
        """The device as torch has it."""
        return torch.device(self.device)
