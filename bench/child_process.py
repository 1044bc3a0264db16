"""Entrants in processes of their own, which wait for commands on a pipe while others are timed.

Threads of two processes that compute on the same cores at once slow each other down many times. Therefore one process
runs at a time; the others block in a read of their pipe, which takes no CPU time.
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
from bench.tasks import Entrant, MissingError, Task, is_missing

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "JAX_PLATFORMS": "cpu",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""Variables of every child process: no warnings, no network, JAX on the CPU, and GPUs in the order of `nvidia-smi`."""


class ChildProcess:
    """A process that runs one function, and the parent's end of the pipe to it."""

    def __init__(
        self,
        target: Callable[..., None],
        *arguments: Any,
        environment: dict[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        """Start the process.

        Args:
            target: the function. It is called with the child's end of the pipe, then with the arguments.
            arguments: its arguments, which must pickle.
            environment: more environment variables of the process.
            threads: number of threads of torch. Default: as many as in the parent.
        """
        parent_end, child_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        main_arguments = (target, child_end, self._folder.name, threads or torch.get_num_threads(), arguments)
        self._process = context.Process(target=_child_main, args=main_arguments, daemon=True)
        # Set in the parent while it starts the child: libraries read them at import, before any function of the child.
        with mock.patch.dict(os.environ, {**ENVIRONMENT, **(environment or {})}):
            self._process.start()
        child_end.close()
        self._pipe = parent_end

    def receive(self, timeout: float) -> Any:
        """Wait for an answer, and return its value.

        Raises:
            MissingError: if the process lacks a library, a device or a feature.
            TimeoutError: if there is no answer within `timeout` seconds; the process is then ended.
            RuntimeError: for any other error of the process, with its text.
        """
        if not self._pipe.poll(timeout):
            self.close()
            raise TimeoutError(f"no answer within {timeout:.0f} s")
        try:
            status, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process ended: exit code {self._process.exitcode}") from None
        if status == "missing":
            raise MissingError(value)
        if status == "error":
            raise RuntimeError(value)
        return value

    def ask(self, *command: Any, timeout: float = 600.0) -> Any:
        """Send a command, wait for its answer, and return the value. Raises what `receive` raises."""
        self.send(*command)
        return self.receive(timeout)

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


def _child_main(
    target: Callable[..., None], pipe: Connection, folder: str, threads: int, arguments: tuple[Any, ...]
) -> None:
    """Run `target` in the child, in a temporary directory; discard its output, and send its error to the parent."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.chdir(folder)
    torch.set_num_threads(threads)
    try:
        target(pipe, *arguments)
    except ClosedError:
        pass
    except BaseException as error:
        pipe.send(error_answer(error))
    sys.stdout.flush()
    # Not a normal exit, which would wait for threads that the trainers leave behind.
    os._exit(0)


def error_answer(error: BaseException) -> tuple[str, str]:
    """Return the answer to the parent for an error: ``("missing", text)`` or ``("error", traceback)``."""
    if is_missing(error):
        return "missing", str(error)
    return "error", traceback.format_exc()[-2000:]


def train_on_command(pipe: Connection, entrant: Entrant, task: Task) -> None:
    """Run in the child: train in turns of as many steps as the parent commands, until it closes the pipe."""
    task = entrant.task(task)
    synchronize = torch.cuda.synchronize if task.device.startswith("cuda") else lambda: None
    gate = Gate(pipe, task.batch(), synchronize)
    if entrant.owns_loop:
        entrant.load()(task, gate)
        return
    run = entrant.load()(task)
    for _ in gate:
        gate.record(run())
