"""Accelerate: the loop of its documentation.

With `best`, the optimizer is fused and model and loss are compiled; with the option `fused`, only the optimizer is
fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.problems import criterion
from bench.tasks import Run, Task


def make(task: Task) -> Run:
    """Prepare the loop: autocast, `backward`, `clip_grad_norm_`, step."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # The precision is global in a process; an earlier case may have set another.
    AcceleratorState._reset_state(reset_partial_state=True)
    precision = "bf16" if task.precision == "bf16" else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=task.device == "cpu")
    module, batch = task.model(), task.batch()
    fused = {"fused": True} if task.option("fused", task.best) else {}
    model, optimizer = accelerator.prepare(module, task.adamw(module.parameters(), **fused))

    # A function of its own: Dynamo limits the number of recompiles per function.
    def loss_of(model: Any) -> Tensor:
        return criterion(model, batch)

    loss_fn = torch.compile(loss_of, backend=task.backend) if task.best else loss_of

    def run() -> Tensor:
        with accelerator.autocast():
            loss = loss_fn(model)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), task.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run
