"""Timing in turns: all entrants run in every round, so that a change of the machine's speed affects all of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from bench.child_process import ChildProcess, train_on_command
from bench.tasks import Entrant, Run, Task

SETTLE_SECONDS = 0.02
"""A pause before and after the turn of another process, after which its threads no longer spin but sleep."""


class Racer(Protocol):
    """An entrant that is ready to be timed."""

    def losses(self, steps: int) -> list[float]:
        """Make the first steps and return their losses."""

    def turn(self, steps: int) -> float:
        """Make so many more steps and return the seconds that they took."""

    def close(self) -> None:
        """Free its memory, and end its processes."""


class LocalRacer:
    """A racer in this process."""

    def __init__(self, run: Run, device: str) -> None:
        self._run = run
        self._synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def losses(self, steps: int) -> list[float]:
        return [float(self._run()) for _ in range(steps)]

    def turn(self, steps: int) -> float:
        run = self._run
        self._synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        self._synchronize()
        return time.perf_counter() - start

    def close(self) -> None:
        del self._run


class ProcessRacer:
    """A racer in a process of its own."""

    def __init__(self, entrant: Entrant, task: Task) -> None:
        self._child, self._timeout = ChildProcess(train_on_command, entrant, task), entrant.timeout

    def losses(self, steps: int) -> list[float]:
        # One step more: a loop that fetches one batch ahead has not computed the last loss yet.
        self._child.ask("run", steps + 1, timeout=self._timeout)
        losses: list[float] = self._child.ask("losses", timeout=self._timeout)
        return losses[:steps]

    def turn(self, steps: int) -> float:
        time.sleep(SETTLE_SECONDS)
        seconds: float = self._child.ask("run", steps)
        time.sleep(SETTLE_SECONDS)
        return seconds

    def close(self) -> None:
        self._child.close()


def make_racer(entrant: Entrant, task: Task) -> Racer:
    """Return an entrant ready to be timed on a task. Raises a MissingError if a library of it is not installed."""
    entrant.require()
    if entrant.own_process:
        return ProcessRacer(entrant, task)
    runner = entrant.load()(entrant.task(task))
    return LocalRacer(runner, task.device) if callable(runner) else runner


def interleaved(
    racers: Mapping[str, Any], *, rounds: int, seconds: float, steps: int | None = None
) -> dict[str, list[float]]:
    """Time racers in turns and return, by name, microseconds a step in each round.

    A turn has `steps` steps, or as many as take about `seconds`.

    The order is drawn anew in each round: a racer that always ran after the same one would always find the same data in
    the CPU's caches. That it runs twice in a row, and finds its own data there, happens to all of them equally often.
    """
    steps_of = {name: steps or _steps_per_turn(racer, seconds) for name, racer in racers.items()}
    times: dict[str, list[float]] = {name: [] for name in racers}
    # Frees the garbage of the preparation now, so that collections within turns are rarer.
    gc.collect()
    for round_number in range(rounds):
        for name in random.Random(round_number).sample(list(racers), len(racers)):
            times[name].append(racers[name].turn(steps_of[name]) / steps_of[name] * 1e6)
    return times


def _steps_per_turn(racer: Any, seconds: float) -> int:
    """Return how many steps take about `seconds`. The steps made to find out also warm the racer up."""
    steps = 1
    duration = racer.turn(steps)
    while duration < seconds / 4 and steps < 1 << 16:
        steps *= 2
        duration = racer.turn(steps)
    return max(1, round(seconds / duration * steps))
