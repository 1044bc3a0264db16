"""Interleaved timing: entrants take turns, so that a drift of the machine hits all of them alike."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from bench.child_process import ChildProcess, train
from bench.tasks import Entrant, Run, Task

SETTLE = 0.02
"""Seconds for the threads of another process to stop spinning and sleep, before and after its turn."""


class Racer(Protocol):
    """One who can make so many steps and say how long they took."""

    def losses(self, steps: int) -> list[float]:
        """The losses of the first steps."""

    def turn(self, steps: int) -> float:
        """The seconds that so many more steps took."""

    def close(self) -> None:
        """Free what it holds."""


class LocalRacer:
    """A racer in this process."""

    def __init__(self, run: Run, device: str) -> None:
        self._run = run
        self._wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def losses(self, steps: int) -> list[float]:
        return [float(self._run()) for _ in range(steps)]

    def turn(self, steps: int) -> float:
        run = self._run
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        self._wait()
        return time.perf_counter() - start

    def close(self) -> None:
        del self._run


class ProcessRacer:
    """A racer in a process of its own."""

    def __init__(self, entrant: Entrant, task: Task) -> None:
        self._child, self._patience = ChildProcess(train, entrant, task), entrant.patience

    def losses(self, steps: int) -> list[float]:
        # One more, for a loop that fetches a batch ahead has not finished the last one.
        self._child.ask("run", steps + 1, patience=self._patience)
        losses: list[float] = self._child.ask("losses", patience=self._patience)
        return losses[:steps]

    def turn(self, steps: int) -> float:
        time.sleep(SETTLE)
        seconds: float = self._child.ask("run", steps)
        time.sleep(SETTLE)
        return seconds

    def close(self) -> None:
        self._child.close()


def racer(entrant: Entrant, task: Task) -> Racer:
    """Make an entrant ready to race."""
    entrant.require()
    if entrant.in_own_process:
        return ProcessRacer(entrant, task)
    runner = entrant.load()(entrant.task(task))
    return LocalRacer(runner, task.device) if callable(runner) else runner


def interleaved(
    racers: Mapping[str, Any], *, rounds: int, seconds: float, steps: int | None = None
) -> dict[str, list[float]]:
    """Time racers in turns of about so many seconds, or of so many steps; return microseconds a step by round.

    Each round has an order of its own, so that nobody always runs behind the same one, or more often than others
    behind himself, when the caches still hold what he needs.
    """
    calls = {name: steps or _calls(one, seconds) for name, one in racers.items()}
    times: dict[str, list[float]] = {name: [] for name in racers}
    # Collections would hit whoever happens to run; each starts with the same clean heap.
    gc.collect()
    for number in range(rounds):
        for name in random.Random(number).sample(list(racers), len(racers)):
            times[name].append(racers[name].turn(calls[name]) / calls[name] * 1e6)
    return times


def _calls(one: Any, seconds: float) -> int:
    """Find how many steps fill a turn, which also warms up; the first ones have been made to compare losses."""
    steps = 1
    while (took := one.turn(steps)) < seconds / 4 and steps < 1 << 16:
        steps *= 2
    return max(1, round(seconds / took * steps))
