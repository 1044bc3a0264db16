"""The loops one writes by hand: eager with the fused AdamW, compiled, and captured as a CUDA graph; all clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.tasks import MAX_NORM, MissingError, Run, Task


def eager(task: Task) -> Run:
    """Forward, backward, clip, fused step."""
    return loop(task, task.loss)


def compiled(task: Task) -> Run:
    """With `torch.compile`: by default of the model alone; at its best of model and loss."""
    if not task.best:
        return loop(task, task.loss, lambda model: torch.compile(model, backend=task.backend))

    # Dynamo counts recompiles of each function apart; a shared one would fill up with those of other entrants.
    def loss_of(model: Any, batch: Any) -> Tensor:
        return task.loss(model, batch)

    return loop(task, torch.compile(loss_of, backend=task.backend))


def medium(task: Task) -> Run:
    """As `compiled`, with `torch.set_float32_matmul_precision("medium")`.

    On a CPU oneDNN then multiplies in place of MKL, without AMX in float32 too.
    """
    run = compiled(task)

    def running() -> Tensor:
        torch.set_float32_matmul_precision("medium")
        try:
            return run()
        finally:
            torch.set_float32_matmul_precision("highest")

    return running


def compiled_update(task: Task) -> Run:
    """Model and loss compiled, and clip and optimizer in a second graph, as torch's recipe for optimizers has it."""
    model, batch = task.model(), task.batch()
    params = list(model.parameters())
    # The recipe's tensor rate and `capturable` are for GPUs; on a CPU torch refuses them, and the rate is constant.
    optimizer = task.adamw(params) if task.device == "cpu" else task.adamw(params, foreach=True, capturable=True)

    @torch.compile(backend=task.backend)
    def loss_of(model: Any, batch: Any) -> Tensor:
        return task.loss(model, batch)

    @torch.compile(backend=task.backend)
    def update() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    def run() -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    return run


def graphed(task: Task) -> Run:
    """The whole iteration captured once as a `torch.cuda.CUDAGraph` and replayed; at its best with a compiled loss."""
    if not task.device.startswith("cuda"):
        raise MissingError("CUDA graphs need a CUDA device")
    model, batch = task.model(), task.batch()
    optimizer = task.adamw(model.parameters(), fused=True, capturable=True)
    loss_fn = torch.compile(task.loss, backend=task.backend) if task.best else task.loss

    def iteration() -> Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return _captured(iteration, [*model.parameters()], optimizer)


def _captured(iteration: Callable[[], Tensor], params: list[Tensor], optimizer: torch.optim.Optimizer) -> Run:
    # The warm-up on a side stream is torch's recipe; what it trained is put back, so that losses start at the start.
    saved = [param.detach().clone() for param in params]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iteration()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = iteration()
    with torch.no_grad():
        for param, value in zip(params, saved, strict=True):
            param.copy_(value)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()

    # The graph works on the memory of model, batch and optimizer, and does not keep it alive.
    def run(_kept: Any = iteration) -> Tensor:
        graph.replay()
        return loss

    return run


def loop(
    task: Task,
    loss_fn: Callable[..., Tensor],
    wrap: Callable[[torch.nn.Module], Callable[..., Tensor]] | None = None,
    make_optimizer: Callable[..., Any] | None = None,
    *,
    clips: bool = True,
) -> Run:
    """The loop: forward of the model, or of what `wrap` makes of it, backward, clip, step of the fused AdamW."""
    model, batch = task.model(), task.batch()
    forward = wrap(model) if wrap else model
    optimizer = (make_optimizer or task.adamw)(model.parameters(), fused=True)

    def run() -> Tensor:
        loss = loss_fn(forward, batch)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run
