"""Techniques that save memory, and `sam`, by hand with torch and without clipping."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.loops import loop
from bench.ours import BUDGET, MICROBATCHES, RHO, folder
from bench.tasks import Run, Task

aten = torch.ops.aten
# The operations whose outputs `remat("dots")` keeps, as torch's selective checkpointing names them.
PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)


def keep_all(task: Task) -> Run:
    """Prepare the loop that keeps all activations."""
    return loop(task, task.loss, clips=False)


def checkpointed(task: Task) -> Run:
    """Prepare the loop with `torch.utils.checkpoint` of each block; the option `products` keeps matrix products."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if task.option("products"):
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(PRODUCTS))

    def rematerialising(model: Any) -> Any:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, **options)
        return model

    return loop(task, task.loss, rematerialising, clips=False)


def saved_on_cpu(task: Task) -> Run:
    """Prepare the loop with `torch.autograd.graph.save_on_cpu`, on a GPU with pinned memory."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        with save_on_cpu(pin_memory=task.device != "cpu"):
            return task.loss(model, batch)

    return loop(task, loss_of, clips=False)


def budgeted(task: Task) -> Run:
    """Prepare the loop with `torch.compile` and an `activation_memory_budget` of one half."""
    from torch._functorch import config

    def loss_of(model: Any, batch: Any) -> Tensor:
        return task.loss(model, batch)

    run = loop(task, torch.compile(loss_of, backend=task.backend), clips=False)

    def run_with_budget() -> Tensor:
        # The first call compiles, and reads this setting.
        with config.patch(activation_memory_budget=BUDGET):
            return run()

    return run_with_budget


def accumulated(task: Task) -> Run:
    """Prepare a loop over microbatches that adds up their gradients."""
    model, batch = task.model(), task.batch()
    chunks = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}
    microbatches = [{name: chunks[name][index] for name in batch} for index in range(MICROBATCHES)]
    optimizer = task.adamw(model.parameters(), fused=True)

    def run() -> Tensor:
        total = torch.zeros((), device=task.device)
        for microbatch in microbatches:
            loss = task.loss(model, microbatch) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return run


def sam(task: Task) -> Run:
    """Prepare sharpness-aware minimisation by hand (Foret et al. 2021, arXiv:2010.01412).

    A step moves the parameters along the gradient, computes the gradient there, moves back, and updates.
    """
    model, batch = task.model(), task.batch()
    params = list(model.parameters())
    optimizer = task.adamw(params, fused=True)

    def run() -> Tensor:
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [param.grad for param in params if param.grad is not None]
        with torch.no_grad():
            moves = torch._foreach_mul(grads, RHO / torch.nn.utils.get_total_norm(grads))
            torch._foreach_add_(params, moves)
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def in_backward(task: Task) -> Run:
    """Prepare an optimizer for each parameter, which a hook steps once the gradient is computed (torch's tutorial)."""
    model, batch = task.model(), task.batch()
    optimizers = _Optimizers({param: task.adamw([param], fused=True) for param in model.parameters()})
    # A strong reference would make a cycle (parameter, hook, optimizer, parameter) that Python cannot collect.
    reference = weakref.ref(optimizers)

    def step(param: Tensor) -> None:
        by_parameter: Any = reference()
        by_parameter[param].step()
        by_parameter[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]

    def run() -> Tensor:
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        # This use of `optimizers` keeps them alive as long as `run`; the hook has only a weak reference.
        return loss.detach() if optimizers else loss

    return run


class _Optimizers(dict[Tensor, torch.optim.Optimizer]):
    """The optimizer of each parameter. A plain dict cannot be referenced weakly; a subclass can."""


def mapped(task: Task) -> Run:
    """Prepare the loop with the fused AdamW, whose moments are memory-mapped files."""

    def moment(name: str, param: Tensor) -> Tensor:
        return torch.from_file(f"{folder().name}/{name}", shared=True, size=param.numel()).view(param.shape)

    def make_optimizer(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        params = list(params)
        optimizer = task.adamw(params, **options)
        for number, param in enumerate(params):
            moments = {name: moment(f"{name}-{number}", param) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.zeros(()), **moments}
        return optimizer

    return loop(task, task.loss, make_optimizer=make_optimizer, clips=False)
