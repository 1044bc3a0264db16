"""The loss head alone, forward and backward: matrix product and cross-entropy, separate or as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import ftrain as ft
from bench.tasks import MissingError, Run, Task

LossOf = Callable[[Any, Tensor], Tensor]


def plain(task: Task) -> Run:
    """Prepare `F.cross_entropy(F.linear(...))`, which stores all logits and their gradient."""

    def loss_of(model: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(model.hidden, model.weight).flatten(0, 1), labels.flatten())

    return _gradient(task, loss_of)


def torch_fused(task: Task) -> Run:
    """Prepare `F.linear_cross_entropy` of torch; with the option `chunked` it computes the logits in chunks.

    Raises:
        MissingError: if torch is older than 2.13, which has no such function.
    """
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise MissingError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = {"options": torch.nn.LinearCrossEntropyOptions()} if task.option("chunked") else {}

    def loss_of(model: Any, labels: Tensor) -> Tensor:
        return function(model.hidden.flatten(0, 1), model.weight, labels.flatten(), **options)

    return _gradient(task, loss_of)


def ours(task: Task) -> Run:
    """Prepare `ft.losses.linear_cross_entropy`."""

    def loss_of(model: Any, labels: Tensor) -> Tensor:
        return ft.losses.linear_cross_entropy(model.hidden, model.weight, labels).value

    return _gradient(task, loss_of)


def _gradient(task: Task, loss_of: LossOf) -> Run:
    model, labels = task.model(), task.batch()["y"]
    loss_fn = torch.compile(loss_of, backend=task.backend) if task.best else loss_of

    def run() -> Tensor:
        model.zero_grad()
        with task.cast():
            loss = loss_fn(model, labels)
        loss.backward()
        return loss.detach()

    return run
