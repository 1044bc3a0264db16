"""Training loops by hand with gradient clipping: eager with the fused AdamW, compiled, and captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.tasks import MissingError, Run, Task


def eager(task: Task) -> Run:
    """Prepare forward, backward, clipping and the fused AdamW."""
    return loop(task, task.loss)


def compiled(task: Task) -> Run:
    """Prepare the loop with `torch.compile` of the model, or with `best` of model and loss."""
    if not task.best:
        return loop(task, task.loss, lambda model: torch.compile(model, backend=task.backend))

    # A new function for each entrant: Dynamo limits the number of recompiles per function.
    def loss_of(model: Any, batch: Any) -> Tensor:
        return task.loss(model, batch)

    return loop(task, torch.compile(loss_of, backend=task.backend))


def compiled_blocks(task: Task) -> Run:
    """Prepare the loop with `torch.compile` of each block."""

    def compile_blocks(model: Any) -> Any:
        for block in model.blocks:
            block.compile(backend=task.backend)
        return model

    return loop(task, task.loss, compile_blocks)


def medium(task: Task) -> Run:
    """Prepare the loop of `compiled` with `torch.set_float32_matmul_precision("medium")`.

    On a CPU, oneDNN then computes matrix products instead of MKL; without AMX, it still does so in float32.
    """
    run = compiled(task)

    def run_at_medium() -> Tensor:
        torch.set_float32_matmul_precision("medium")
        try:
            return run()
        finally:
            torch.set_float32_matmul_precision("highest")

    return run_at_medium


def compiled_update(task: Task) -> Run:
    """Prepare the loop with two compiled graphs: model and loss, and clipping and optimizer (as in torch's recipe)."""
    model, batch = task.model(), task.batch()
    params = list(model.parameters())
    # On a CPU, torch refuses `capturable`. The recipe's learning rate as a tensor is not needed: the rate is constant.
    optimizer = task.adamw(params) if task.device == "cpu" else task.adamw(params, foreach=True, capturable=True)

    @torch.compile(backend=task.backend)
    def loss_of(model: Any, batch: Any) -> Tensor:
        return task.loss(model, batch)

    @torch.compile(backend=task.backend)
    def update() -> None:
        torch.nn.utils.clip_grad_norm_(params, task.max_norm)
        optimizer.step()

    def run() -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    return run


def graphed(task: Task) -> Run:
    """Prepare the whole iteration as one `torch.cuda.CUDAGraph`, which is replayed; with `best` the loss is compiled.

    Raises:
        MissingError: if the device is not a CUDA device.
    """
    if not task.device.startswith("cuda"):
        raise MissingError("CUDA graphs need a CUDA device")
    model, batch = task.model(), task.batch()
    params = list(model.parameters())
    optimizer = task.adamw(params, fused=True, capturable=True)
    loss_fn = torch.compile(task.loss, backend=task.backend) if task.best else task.loss

    def iteration() -> Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, task.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return _captured(iteration, params, optimizer)


def _captured(iteration: Callable[[], Tensor], params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> Run:
    """Capture an iteration and return its replay. Parameters and optimizer state are as before the warm-up."""
    # torch's recipe warms up on a side stream. The warm-up trains, so the parameters are saved and restored.
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

    # The default argument keeps model, batch and optimizer alive: the graph uses their memory without a reference.
    def run(_kept_alive: Any = iteration) -> Tensor:
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
    """Prepare the eager loop: forward, backward, clipping, and a step of the optimizer.

    Args:
        task: what to train.
        loss_fn: computes the loss of a model (or of `wrap(model)`) on a batch.
        wrap: replaces the model in the forward pass.
        make_optimizer: makes the optimizer of the parameters. Default: AdamW.
        clips: whether to clip the gradient.
    """
    model, batch = task.model(), task.batch()
    forward = wrap(model) if wrap else model
    # Listed once: finding the parameters of a model in each step takes milliseconds if there are thousands.
    params = list(model.parameters())
    optimizer = (make_optimizer or task.adamw)(params, fused=True)

    def run() -> Tensor:
        loss = loss_fn(forward, batch)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(params, task.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run
