"""Entrants in processes of their own, blocked on a pipe while others are timed.

Two processes whose threads compute beside each other on the same cores would slow each other down many times, so one
of them runs at a time and the others wait in a read, which costs nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

from bench.gate import ClosedError, Gate
from bench.tasks import Entrant, MissingError, Task, absent

QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "JAX_PLATFORMS": "cpu",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}


class ChildProcess:
    """A function in a process of its own, and the pipe to it."""

    def __init__(
        self,
        target: Callable[..., None],
        *arguments: Any,
        environment: dict[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        """Start the process.

        Args:
            target: called in the process with its end of the pipe, then the arguments.
            arguments: of the function.
            environment: further variables of the process.
            threads: of torch, on any core. Default: as many as here, and as many cores.
        """
        parent_end, child_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        folder, count = self._folder.name, threads or torch.get_num_threads()
        all_arguments = target, child_end, folder, count, threads is None, arguments
        self._process = context.Process(target=_entered, args=all_arguments, daemon=True)
        # It inherits them, since its imports may read them before its first line of ours.
        with mock.patch.dict(os.environ, {**QUIET, **(environment or {})}):
            self._process.start()
        child_end.close()
        self._pipe = parent_end

    def receive(self, patience: float) -> Any:
        """Wait for an answer.

        Raises:
            MissingError: when the process lacks what it needs.
            TimeoutError: when there is no answer within so many seconds.
            RuntimeError: for any other error of the process, with its text.
        """
        if not self._pipe.poll(patience):
            self.close()
            raise TimeoutError(f"no answer within {patience:.0f} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process ended: exit code {self._process.exitcode}") from None
        if kind == "missing":
            raise MissingError(value)
        if kind == "error":
            raise RuntimeError(value)
        return value

    def ask(self, *command: Any, patience: float = 600.0) -> Any:
        """Send a command and wait for its answer."""
        self.send(*command)
        return self.receive(patience)

    def send(self, *command: Any) -> None:
        """Send a command."""
        self._pipe.send(command)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        self._folder.cleanup()


def _entered(
    target: Callable[..., None],
    pipe: Connection,
    folder: str,
    threads: int,
    limits_cores: bool,
    arguments: tuple[Any, ...],
) -> None:
    """Run in the child: what it prints goes nowhere, the files that it writes to a folder, its errors to the parent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(folder)
    torch.set_num_threads(threads)
    if limits_cores and hasattr(os, "sched_setaffinity"):
        # JAX takes a thread for each core it may use; torch has been told.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    try:
        target(pipe, *arguments)
    except ClosedError:
        pass
    except BaseException as error:
        pipe.send(told(error))
    sys.stdout.flush()
    # Trainers leave threads that would keep the process.
    os._exit(0)


def told(error: BaseException) -> tuple[str, str]:
    """Return the answer that says what was raised, to be sent where it is handled."""
    return ("missing", str(error)) if absent(error) else ("error", traceback.format_exc()[-2000:])


def train(pipe: Connection, entrant: Entrant, task: Task) -> None:
    """Run in the child: train in turns, as the parent commands."""
    task = entrant.task(task)
    wait = torch.cuda.synchronize if task.device.startswith("cuda") else lambda: None
    gate = Gate(pipe, task.batch(), wait)
    if entrant.owns_loop:
        entrant.load()(task, gate)
        return
    run = entrant.load()(task)
    for _ in gate:
        gate.record(run())
