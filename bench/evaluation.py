"""An evaluation of a few batches: the loop one writes by hand, eager or compiled, and `ft.evaluate`."""

from __future__ import annotations

import torch
from torch import Tensor

import ftrain as ft
from bench import ours
from bench.tasks import Run, Task

BATCHES = 8
"""Of one evaluation, which is a step of a turn."""


def by_hand(task: Task) -> Run:
    """The mean over all examples, read once at the end; with the option `compile` of `torch.compile(model)`."""
    model, batch = task.model().eval(), task.batch()
    forward = torch.compile(model, backend=task.backend) if task.option("compile") else model
    examples = len(batch["x"])

    def run() -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        with torch.no_grad():
            for _ in range(BATCHES):
                total += task.loss(forward, batch) * examples
                count += examples
        return total / count

    return run


def evaluate(task: Task) -> Run:
    """`ft.evaluate`; with the option `compile` of a compiled `EvalStep`."""
    loss = ours.loss(task)
    step = ft.eval_step(loss)
    step = ours.compile_wrapper(task)(step) if task.option("compile") else step
    state, data = ft.train_step(loss, ft.optim.sgd(0.1)).init(device=task.device), [task.batch()] * BATCHES
    return lambda: torch.tensor(ft.evaluate(step, state, data)["loss"])
