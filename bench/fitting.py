"""`ft.fit` as an entrant: a turn is one whole call of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Any

import ftrain as ft
from bench.ours import step_of
from bench.tasks import Task
from ftrain.training.history import History


class FitRacer:
    """A racer whose turn is a call of `ft.fit`; with the option `progress`, it writes its progress bar to /dev/null."""

    def __init__(self, task: Task) -> None:
        self._step, self._batch = step_of(task), task.batch()
        self._state: Any = self._step.init(device=task.device)
        self._progress = task.option("progress", False)

    def losses(self, steps: int) -> list[float]:
        return [float(loss) for loss in self._fit(steps)["loss"]]

    def turn(self, steps: int) -> float:
        start = time.perf_counter()
        self._fit(steps)
        return time.perf_counter() - start

    def close(self) -> None:
        del self._state

    def _fit(self, steps: int) -> History:
        target = int(self._state.step) + steps
        data = itertools.repeat(self._batch)
        with (
            open(os.devnull, "w", encoding="utf-8") as devnull,
            contextlib.redirect_stdout(devnull),
            contextlib.redirect_stderr(devnull),
        ):
            self._state, history = ft.fit(self._step, self._state, data, steps=target, progress=self._progress)
        return history


def fit(task: Task) -> FitRacer:
    """Prepare `ft.fit` with the compiled step, or with the option ``compile=False`` the eager one."""
    return FitRacer(task)
