"""A problem on a device in a precision: what an entrant is given, in this process or in another."""

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

MAX_NORM = 1.0

Run = Callable[[], Tensor]
"""Make one more step and return its loss, without waiting for the device."""


class MissingError(Exception):
    """A library, a device or a feature that an entrant needs is not there."""


def absent(error: BaseException) -> bool:
    """Whether an error says that something optional is not there; a broken import of ours is no such error."""
    if isinstance(error, ModuleNotFoundError):
        return (error.name or "").split(".")[0] not in {"", "ftrain", "bench", "torch"}
    return isinstance(error, MissingError)


@dataclass(frozen=True)
class Task:
    """What to train and how; small and plain, so that it can be sent to another process."""

    problem: str
    precision: str = "fp32"
    device: str = "cpu"
    tiny: bool = False
    backend: str = "inductor"
    best: bool = False
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
        """One of the options of the entrant."""
        return dict(self.options).get(name, default)

    def with_options(self, **options: Any) -> Task:
        """The same task with more options."""
        return dataclasses.replace(self, options=(*self.options, *options.items()))

    def model(self) -> nn.Module:
        """The model, with the same weights every time."""
        torch.manual_seed(0)
        # On the device, where a billion numbers are drawn in a moment.
        with torch.device(self.device):
            return self.spec.model(self.sizes)

    def batch(self) -> Batch:
        """The batch, the same every time; with the option `rows` those rows of it."""
        torch.manual_seed(1)
        rows = slice(*self.option("rows", (None,)))
        return {name: value[rows].to(self.device) for name, value in self.spec.batch(tiny=self.tiny).items()}

    def loss(self, model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        """The loss in the precision of the task, as a hand-written loop computes it."""
        with self.cast():
            return criterion(model, batch)

    def cast(self) -> AbstractContextManager[Any]:
        """Autocast, where the precision asks for it."""
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def adamw(self, params: Any, **options: Any) -> torch.optim.AdamW:
        """AdamW of torch without decay, in which all entrants agree whatever they would decay."""
        return torch.optim.AdamW(params, lr=self.rate, weight_decay=0.0, **options)


@dataclass(frozen=True)
class Entrant:
    """One who trains: a name, its kind (which claims compare), and where its code is.

    Args:
        name: as rows show it.
        kind: ``ours``, ``hand eager``, ``hand compile``, ``hand graph``, ``trainer``, ``jax`` or ``control``.
        code: ``module:function``, which makes of a `Task` a `Run`, or with `owns_loop` runs ``(task, batches)``.
        best: whether its options are turned for speed.
        in_own_process: runs in a process of its own, since it owns the loop or a runtime with threads.
        needs: the libraries it imports, so that a missing one is known before a process is started.
        checked: whether its losses must be those of others; not of one that shows a bound, and trains otherwise.
        patience: seconds after which an entrant with its own process is given up, while it gets ready.
    """

    name: str
    kind: str
    code: str
    best: bool = False
    in_own_process: bool = False
    owns_loop: bool = False
    needs: tuple[str, ...] = ()
    checked: bool = True
    patience: float = 300.0
    options: tuple[tuple[str, Any], ...] = ()

    def task(self, task: Task) -> Task:
        """The task with the options of the entrant."""
        return dataclasses.replace(task, best=self.best, options=(*task.options, *self.options))

    def require(self) -> None:
        """Raise `MissingError` for a library that is not installed."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingError(f"not installed: {', '.join(missing)}")

    def load(self) -> Callable[..., Any]:
        """Import the code; what it imports of libraries it imports only when called."""
        module, function = self.code.split(":")
        return getattr(__import__(module, fromlist=[function]), function)  # type: ignore[no-any-return]
