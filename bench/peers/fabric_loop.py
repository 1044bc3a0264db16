"""Lightning Fabric: the loop of its documentation; with `best`, a fused optimizer, and model and loss compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.problems import criterion
from bench.tasks import Run, Task


def make(task: Task) -> Run:
    """Prepare the loop: `setup`, then `backward`, `clip_gradients`, step."""
    from lightning.fabric import Fabric

    fabric = Fabric(
        accelerator="cpu" if task.device == "cpu" else "gpu",
        devices=1,
        precision="bf16-mixed" if task.precision == "bf16" else "32-true",
    )
    module, batch = task.model(), task.batch()
    optimizer = task.adamw(module.parameters(), **({"fused": True} if task.best else {}))
    model, optimizer = fabric.setup(module, optimizer)

    # A function of its own: Dynamo limits the number of recompiles per function.
    def loss_of(model: Any) -> Tensor:
        return criterion(model, batch)

    loss_fn = torch.compile(loss_of, backend=task.backend) if task.best else loss_of

    def run() -> Tensor:
        loss = loss_fn(model)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=task.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run
