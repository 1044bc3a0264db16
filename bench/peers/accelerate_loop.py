"""Accelerate: the loop of its documentation. Best adds the fused optimizer, and model and loss compiled.

The option `fused` adds the fused optimizer alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.problems import criterion
from bench.tasks import MAX_NORM, Run, Task


def make(task: Task) -> Run:
    """Set up by `prepare`; then autocast, `backward`, `clip_grad_norm_`, step."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # A process holds one precision at a time, and an earlier case may have left another.
    AcceleratorState._reset_state(reset_partial_state=True)
    precision = "bf16" if task.precision == "bf16" else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=task.device == "cpu")
    module, batch = task.model(), task.batch()
    fused = {"fused": True} if task.option("fused", task.best) else {}
    model, optimizer = accelerator.prepare(module, task.adamw(module.parameters(), **fused))

    # Dynamo counts recompiles of a function of this file apart from those of other entrants.
    def loss_of(model: Any) -> Tensor:
        return criterion(model, batch)

    loss_fn = torch.compile(loss_of, backend=task.backend) if task.best else loss_of

    def run() -> Tensor:
        with accelerator.autocast():
            loss = loss_fn(model)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run
