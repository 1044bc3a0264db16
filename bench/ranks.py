"""Ranks: processes that train together, each with one thread. An entrant has ranks of its own; those of others wait.

In processes that all share, an entrant that keeps its buffers gains on one that allocates them in each step, and gets
what the others have freed. An entrant of ftrain is given the whole batch on every rank; others the rows of their rank.
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

from bench.child_process import ChildProcess, told
from bench.memory import MALLOC, Peak, measure
from bench.tasks import Entrant, Run, Task
from bench.timing import SETTLE, LocalRacer

PATIENCE = 900.0
"""Seconds after which ranks that do not answer, or wait for each other, are given up: long, for they may compile."""


class Ranks:
    """A number of processes that communicate by gloo, or on a GPU by NCCL."""

    def __init__(self, size: int, device: str, environment: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        meeting = str(Path(self._folder.name) / "store")
        variables = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        self._children = [
            ChildProcess(
                _serve,
                rank,
                size,
                device,
                meeting,
                environment={**variables, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                threads=1,
            )
            for rank in range(size)
        ]

    def ask(self, *command: Any, patience: float = PATIENCE) -> list[Any]:
        """Send a command to all ranks, and return their answers in the order of ranks.

        Raises:
            TimeoutError: when one does not answer; all are then ended.
            Exception: of the first rank that raised one, as `ChildProcess.receive` says.
        """
        for child in self._children:
            child.send(*command)
        answers, errors = [], []
        for child in self._children:
            try:
                answers.append(child.receive(patience))
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
        self._ranks, self._patience = Ranks(size, task.device), entrant.patience
        try:
            self._ranks.ask("enter", entrant, task, patience=self._patience)
        except BaseException:
            self.close()
            raise

    def losses(self, steps: int) -> list[float]:
        """Means over ranks: an entrant may know the loss of its rows alone."""
        losses = torch.tensor(self._ranks.ask("losses", steps, patience=self._patience))
        return losses.mean(0).tolist()  # type: ignore[no-any-return]

    def turn(self, steps: int) -> float:
        """The seconds of the slowest rank, after all have waited for each other."""
        time.sleep(SETTLE)
        return max(self._ranks.ask("turn", steps))

    def close(self) -> None:
        self._ranks.close()


def peak(entrant: Entrant, task: Task, size: int) -> Peak:
    """Return the bytes that training holds at its most on that rank which holds most, on ranks of its own.

    Raises:
        MissingError: where the system does not tell, or the entrant lacks what it needs.
    """
    entrant.require()
    ranks = Ranks(size, task.device, MALLOC)
    try:
        peaks = ranks.ask("peak", entrant, task, patience=entrant.patience)
    finally:
        ranks.close()
    return Peak(*(max(values) for values in zip(*peaks, strict=True)))


def _serve(pipe: Connection, rank: int, size: int, device: str, meeting: str) -> None:
    """Run in a rank: answer commands until the pipe is closed."""
    backend = "nccl" if device.startswith("cuda") else "gloo"
    timeout = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timeout)
    racers: list[LocalRacer] = []
    answers: dict[str, Callable[..., Any]] = {
        "enter": lambda entrant, task: racers.append(LocalRacer(_run(entrant, task), device)),
        "losses": lambda steps: racers[0].losses(steps),
        "turn": lambda steps: _turn(racers[0], steps),
        "peak": lambda entrant, task: measure(lambda: _run(entrant, task)),
    }
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("answer", answers[command](*arguments)))
        except Exception as error:
            pipe.send(told(error))


def _run(entrant: Entrant, task: Task) -> Run:
    task, rank = entrant.task(task), dist.get_rank()
    if entrant.kind != "ours":
        length = task.sizes.batch // dist.get_world_size()
        task = task.with_options(rows=(rank * length, (rank + 1) * length))
    run: Run = entrant.load()(task)
    return run


def _turn(racer: LocalRacer, steps: int) -> float:
    # Collections would hit whoever happens to run.
    gc.collect()
    dist.barrier()
    return racer.turn(steps)
