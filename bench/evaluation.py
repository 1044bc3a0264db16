"""The evaluation of a few batches: a loop by hand, eager or compiled, and `ft.evaluate`."""

from __future__ import annotations

import torch
from torch import Tensor

import ftrain as ft
from bench import ours
from bench.tasks import Run, Task

BATCHES = 8
"""The number of batches of one evaluation, which is timed as one step."""


def by_hand(task: Task) -> Run:
    """Prepare a loop that computes the mean loss of all examples.

    With the option ``compile="model"`` the model is compiled, with ``compile="loss"`` model and loss.
    """
    model, batch = task.model().eval(), task.batch()
    compiled, forward, loss_fn = task.option("compile"), model, task.loss
    if compiled == "model":
        forward = torch.compile(model, backend=task.backend)
    elif compiled == "loss":
        loss_fn = torch.compile(lambda model, batch: task.loss(model, batch), backend=task.backend)
    examples = len(batch["x"])

    def run() -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        with torch.inference_mode():
            for _ in range(BATCHES):
                total += loss_fn(forward, batch) * examples
                count += examples
        return total / count

    return run


def evaluate(task: Task) -> Run:
    """Prepare `ft.evaluate`; with the option `compile` its step is compiled."""
    loss = ours.loss(task)
    step = ft.eval_step(loss)
    if task.option("compile"):
        step = ours.compile_wrapper(task)(step)
    state = ft.train_step(loss, ft.optim.sgd(0.1)).init(device=task.device)
    data = [task.batch()] * BATCHES
    return lambda: torch.tensor(ft.evaluate(step, state, data)["loss"])
