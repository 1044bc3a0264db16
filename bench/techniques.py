"""What spends less memory, and `sam`, by hand with torch and as wrappers of a step; nobody clips."""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ftrain as ft
from bench.loops import loop
from bench.ours import make_run
from bench.problems import criterion
from bench.tasks import Run, Task

MICROBATCHES = 4
BUDGET = 0.5
RHO = 0.05
aten = torch.ops.aten
PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)

OURS: Mapping[str, Callable[[str], Any]] = {
    "remat()": lambda folder: ft.remat(),
    'remat("dots")': lambda folder: ft.remat("dots"),
    "remat(budget=0.3)": lambda folder: ft.remat(budget=0.3),
    "remat(budget=0.5)": lambda folder: ft.remat(budget=BUDGET),
    "accumulate(4)": lambda folder: ft.accumulate(MICROBATCHES),
    "sam()": lambda folder: ft.sam(RHO),
    "update_in_backward()": lambda folder: ft.update_in_backward(),
    'offload("opt_state", directory)': lambda folder: ft.offload("opt_state", directory=folder),
    'offload("activations")': lambda folder: ft.offload("activations"),
    "compiled()": lambda folder: ft.compiled(donate=True),
    "split": lambda folder: ft.compiled(lowering="split", donate=True),
}


def ours(task: Task) -> Run:
    """The donated step with the wrappers of the option `wrappers`."""
    return make_run(step_of(task), task)


def step_of(task: Task) -> ft.Step:
    """The step that `ours` runs."""
    wrappers = [OURS[name](_folder().name) for name in task.option("wrappers", ())]
    step = ft.train_step(ft.from_module(task.model(), criterion), ft.optim.adamw(task.rate))
    return ft.compose(step, *wrappers, ft.donated())  # type: ignore[no-any-return]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where files go, on the disk of this checkout: gone with the process."""
    return tempfile.TemporaryDirectory(prefix="bench-", dir=".")


def kept(task: Task) -> Run:
    """Forward, backward, fused step: everything is kept."""
    return loop(task, task.loss, clips=False)


def checkpointed(task: Task) -> Run:
    """`torch.utils.checkpoint` around each block, which keeps nothing of its inside, or products (`products`)."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if task.option("products"):
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(PRODUCTS))

    def rematerialising(model: Any) -> Any:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, **options)
        return model

    return loop(task, task.loss, rematerialising, clips=False)


def saved_on_cpu(task: Task) -> Run:
    """`torch.autograd.graph.save_on_cpu` around the forward pass, with page-locked memory."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        with save_on_cpu(pin_memory=task.device != "cpu"):
            return task.loss(model, batch)

    return loop(task, loss_of, clips=False)


def budgeted(task: Task) -> Run:
    """`torch.compile` with half of the activations, as its partitioner counts them."""
    from torch._functorch import config

    def loss_of(model: Any, batch: Any) -> Tensor:
        return task.loss(model, batch)

    run = loop(task, torch.compile(loss_of, backend=task.backend), clips=False)

    def running() -> Tensor:
        # Read when it is compiled.
        with config.patch(activation_memory_budget=BUDGET):
            return run()

    return running


def accumulated(task: Task) -> Run:
    """One microbatch after the other, each with its share of the loss."""
    model, batch = task.model(), task.batch()
    pieces = [
        dict(zip(batch, part, strict=True))
        for part in zip(*(v.chunk(MICROBATCHES) for v in batch.values()), strict=True)
    ]
    optimizer = task.adamw(model.parameters(), fused=True)

    def run() -> Tensor:
        total = torch.zeros((), device=task.device)
        for piece in pieces:
            loss = task.loss(model, piece) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return run


def two_passes(task: Task) -> Run:
    """Sharpness-aware minimisation: a pass to move the parameters uphill, one for the gradient there, and back."""
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
    """An optimizer for each parameter, stepped by a hook when its gradient is there, as torch's tutorial has it."""
    model, batch = task.model(), task.batch()
    optimizers = _Optimizers({param: task.adamw([param], fused=True) for param in model.parameters()})
    # A hook that held them would keep parameters alive that nobody else has, for no collector sees into hooks.
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
        # Held here.
        return loss.detach() if optimizers else loss

    return run


class _Optimizers(dict[Tensor, torch.optim.Optimizer]):
    """An optimizer for each parameter; a dict that can be referred to weakly."""


def mapped(task: Task) -> Run:
    """The fused AdamW with moments that are memory-mapped files."""

    def moment(name: str, param: Tensor) -> Tensor:
        return torch.from_file(f"{_folder().name}/{name}", shared=True, size=param.numel()).view(param.shape)

    def make_optimizer(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        params = list(params)
        optimizer = task.adamw(params, **options)
        for number, param in enumerate(params):
            moments = {name: moment(f"{name}-{number}", param) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.zeros(()), **moments}
        return optimizer

    return loop(task, task.loss, make_optimizer=make_optimizer, clips=False)
