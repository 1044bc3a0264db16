"""Entrants that train on several ranks: processes with one thread each.

Each entrant has its own ranks, which wait while those of others are timed. In shared processes the memory that one
entrant frees would serve the next, which helps entrants that allocate buffers in each step.

An entrant of ftrain gets the whole batch on every rank; the others get the rows of their rank.
"""

from __future__ import annotations

import datetime
import gc
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.child_process import ChildProcess, error_answer
from bench.memory import MALLOC, Peak, measure_peak
from bench.tasks import Entrant, Run, Task
from bench.timing import SETTLE_SECONDS, LocalRacer

TIMEOUT = 900.0
"""Seconds to wait for an answer of a rank, and for other ranks in a collective; long, because ranks may compile."""


class Ranks:
    """Processes that communicate by gloo, or on a GPU by NCCL."""

    def __init__(self, size: int, device: str, environment: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        store = str(Path(self._folder.name) / "store")
        variables = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        self._children = [
            ChildProcess(
                _serve,
                rank,
                size,
                device,
                store,
                environment={**variables, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                threads=1,
            )
            for rank in range(size)
        ]

    def ask(self, *command: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Send a command to all ranks, and return their answers in the order of ranks.

        Raises:
            TimeoutError: if a rank does not answer; all ranks are then ended.
            Exception: the error of the first rank that failed, as `ChildProcess.receive` raises it.
        """
        for child in self._children:
            child.send(*command)
        answers, errors = [], []
        for child in self._children:
            try:
                answers.append(child.receive(timeout))
            except TimeoutError:
                self.close()
                raise
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()
        self._folder.cleanup()


class RankRacer:
    """An entrant on ranks of its own."""

    def __init__(self, entrant: Entrant, task: Task, size: int) -> None:
        entrant.require()
        self._ranks, self._timeout = Ranks(size, task.device), entrant.timeout
        try:
            self._ranks.ask("enter", entrant, task, timeout=self._timeout)
        except BaseException:
            self.close()
            raise

    def losses(self, steps: int) -> list[float]:
        """Return the losses, averaged over ranks: a rank may know only the loss of its own rows."""
        losses = torch.tensor(self._ranks.ask("losses", steps, timeout=self._timeout))
        return losses.mean(0).tolist()  # type: ignore[no-any-return]

    def turn(self, steps: int) -> float:
        """Return the seconds of the slowest rank; all ranks start together."""
        time.sleep(SETTLE_SECONDS)
        return max(self._ranks.ask("turn", steps))

    def close(self) -> None:
        self._ranks.close()


def peak(entrant: Entrant, task: Task, size: int) -> Peak:
    """Measure the peak memory of training on `size` new ranks, and return that of the rank with the highest peak.

    Raises:
        MissingError: if the system does not report peak memory, or the entrant lacks what it needs.
    """
    entrant.require()
    ranks = Ranks(size, task.device, MALLOC)
    try:
        peaks = ranks.ask("peak", entrant, task, timeout=entrant.timeout)
    finally:
        ranks.close()
    return Peak(*(max(values) for values in zip(*peaks, strict=True)))


def _serve(pipe: Connection, rank: int, size: int, device: str, store: str) -> None:
    """Run in a rank: answer commands until the pipe is closed."""
    backend = "nccl" if device.startswith("cuda") else "gloo"
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    racers: list[LocalRacer] = []
    answers: dict[str, Callable[..., Any]] = {
        "enter": lambda entrant, task: racers.append(LocalRacer(_run(entrant, task), device)),
        "losses": lambda steps: racers[0].losses(steps),
        "turn": lambda steps: _turn(racers[0], steps),
        "peak": lambda entrant, task: measure_peak(lambda: _run(entrant, task)),
    }
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("answer", answers[command](*arguments)))
        except Exception as error:
            pipe.send(error_answer(error))


def _run(entrant: Entrant, task: Task) -> Run:
    """Prepare an entrant in this rank."""
    task, rank = entrant.task(task), dist.get_rank()
    if entrant.category != "ours":
        length = task.sizes.batch // dist.get_world_size()
        task = task.with_options(rows=(rank * length, (rank + 1) * length))
    run: Run = entrant.load()(task)
    return run


def _turn(racer: LocalRacer, steps: int) -> float:
    # A garbage collection within the turn would be timed.
    gc.collect()
    dist.barrier()
    return racer.turn(steps)
