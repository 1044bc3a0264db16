"""The task, which says what to train, and the entrant, which says by which code."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.problems import PROBLEMS, Batch, Problem, Sizes, criterion

Run = Callable[[], Tensor]
"""Makes one more step and returns its loss, without waiting for the device."""


class MissingError(Exception):
    """A library, a device or a feature that an entrant needs is missing."""


def is_missing(error: BaseException) -> bool:
    """Whether an error says that something optional is missing. A failed import of ftrain, bench or torch does not."""
    if isinstance(error, ModuleNotFoundError):
        return (error.name or "").split(".")[0] not in {"", "ftrain", "bench", "torch"}
    return isinstance(error, MissingError)


@dataclass(frozen=True)
class Task:
    """What to train and how. It has plain values only, so that it can be sent to another process.

    Args:
        problem: a name in `PROBLEMS`.
        precision: ``fp32``, ``tf32`` or ``bf16``.
        device: the name of the device.
        tiny: whether to use the tiny sizes of the problem.
        backend: the backend of `torch.compile` and `ft.compiled`.
        best: whether the entrant uses its fastest options.
        max_norm: the norm to which gradients are clipped.
        options: pairs of name and value, which the code of an entrant reads.
    """

    problem: str
    precision: str = "fp32"
    device: str = "cpu"
    tiny: bool = False
    backend: str = "inductor"
    best: bool = False
    max_norm: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def spec(self) -> Problem:
        return PROBLEMS[self.problem]

    @property
    def sizes(self) -> Sizes:
        return self.spec.sizes(tiny=self.tiny)

    @property
    def rate(self) -> float:
        return self.spec.rate

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value of an option."""
        return dict(self.options).get(name, default)

    def with_options(self, **options: Any) -> Task:
        """Return this task with more options."""
        return dataclasses.replace(self, options=(*self.options, *options.items()))

    def model(self) -> nn.Module:
        """Return a new model, always with the same weights."""
        torch.manual_seed(0)
        # Initialised on the device: a CPU needs long to draw a billion weights.
        with torch.device(self.device):
            return self.spec.model(self.sizes)

    def batch(self) -> Batch:
        """Return the batch, always with the same values; with the option ``rows=(start, stop)`` only these rows."""
        torch.manual_seed(1)
        rows = slice(*self.option("rows", (None,)))
        return {name: value[rows].to(self.device) for name, value in self.spec.batch(tiny=self.tiny).items()}

    def loss(self, model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        """Return the loss in the precision of the task, as a loop by hand computes it."""
        with self.cast():
            return criterion(model, batch)

    def cast(self) -> AbstractContextManager[Any]:
        """Return the context of autocast for bf16, and an empty context for other precisions."""
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def adamw(self, params: Any, **options: Any) -> torch.optim.AdamW:
        """Return torch's AdamW without weight decay: the libraries differ in which parameters they decay."""
        return torch.optim.AdamW(params, lr=self.rate, weight_decay=0.0, **options)


@dataclass(frozen=True)
class Entrant:
    """One implementation of the training step of a task.

    Args:
        name: its name in rows.
        category: ``ours`` (its time is divided by that of every other entrant), ``control`` (by that of the first
            entrant only), or a name for people, such as ``hand compile``, by which claims select entrants.
        entry_point: ``module:function``. The function takes a `Task` and returns a `Run` (or a `Racer`); with
            `owns_loop` it takes a task and a `Gate` and trains until the gate closes.
        best: whether it uses its fastest options.
        own_process: whether it runs in a process of its own, because it owns the loop or has threads of its own.
        owns_loop: whether the loop over batches is inside the library.
        required_libraries: what it imports; a missing one is found before a process is started.
        compares_losses: whether its losses must be those of the others. False for an entrant that trains differently
            and is timed only as a bound.
        timeout: seconds that it may take to prepare in a process of its own.
        options: the options of its task.
    """

    name: str
    category: str
    entry_point: str
    best: bool = False
    own_process: bool = False
    owns_loop: bool = False
    required_libraries: tuple[str, ...] = ()
    compares_losses: bool = True
    timeout: float = 300.0
    options: tuple[tuple[str, Any], ...] = ()

    def task(self, task: Task) -> Task:
        """Return the task with the options of this entrant."""
        return dataclasses.replace(task, best=self.best, options=(*task.options, *self.options))

    def require(self) -> None:
        """Raise `MissingError` for a library that is not installed."""
        missing = [name for name in self.required_libraries if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingError(f"not installed: {', '.join(missing)}")

    def load(self) -> Callable[..., Any]:
        """Import and return the function of `entry_point`, which imports the library only when it is called."""
        module, function = self.entry_point.split(":")
        return getattr(__import__(module, fromlist=[function]), function)  # type: ignore[no-any-return]
