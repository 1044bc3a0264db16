"""The Trainer of Lightning; with `best`, its `barebones` mode (made to measure its overhead) and a compiled loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.gate import Gate
from bench.peers.hf_trainer import GateDataset
from bench.problems import criterion
from bench.tasks import Task


def drive(task: Task, gate: Gate) -> None:
    """Train until the gate closes."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()
            self.loss_fn = torch.compile(criterion, backend=task.backend) if task.best else criterion

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.loss_fn(self.model, batch)
            gate.record(loss)
            return loss

        def configure_optimizers(self) -> Any:
            # Lightning refuses to clip for a fused optimizer in mixed precision.
            fused = task.best and task.precision != "bf16"
            return task.adamw(self.parameters(), **({"fused": True} if fused else {}))

    options: dict[str, Any] = {"barebones": True} if task.best else {"enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_steps=-1,
        max_epochs=-1,
        accelerator="cpu" if task.device == "cpu" else "gpu",
        devices=1,
        precision="bf16-mixed" if task.precision == "bf16" else "32-true",
        gradient_clip_val=task.max_norm,
        **options,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(GateDataset(gate), batch_size=None))
