"""The Trainer of transformers, on a batch that is already collated, so that only its loop is timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.gate import Gate
from bench.problems import criterion
from bench.tasks import Task

FOREVER = 10_000_000
"""Number of steps of a run that never ends: so many that the linear schedule keeps the learning rate constant."""


class WithLoss(nn.Module):
    """A model that computes its own loss, as the Trainer requires."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": criterion(self.model, {"x": x, "y": y})}


class GateDataset(torch.utils.data.IterableDataset):
    """The batches of a gate as a dataset."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __iter__(self) -> Any:
        return iter(self.gate)


def drive(task: Task, gate: Gate) -> None:
    """Train until the gate closes."""
    from transformers import Trainer, TrainingArguments

    class Recording(Trainer):
        def training_step(self, *args: Any, **options: Any) -> Tensor:
            loss = super().training_step(*args, **options)
            gate.record(loss)
            return loss

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, batch_size=None))

    best: dict[str, Any] = {}
    if task.best:
        best = {
            "disable_tqdm": True,
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,
            "report_to": "none",
            "optim": "adamw_torch_fused",
            "torch_compile": True,
            "torch_compile_backend": task.backend,
        }
    arguments = TrainingArguments(
        output_dir="trainer",
        max_steps=FOREVER,
        learning_rate=task.rate,
        weight_decay=0.0,
        max_grad_norm=task.max_norm,
        save_strategy="no",
        # Else batches of an `IterableDataset` are copied and broadcast, which those of other datasets are not.
        accelerator_config={"dispatch_batches": False},
        use_cpu=task.device == "cpu",
        bf16=task.precision == "bf16",
        **best,
    )
    Recording(model=WithLoss(task.model()), args=arguments, train_dataset=GateDataset(gate)).train()
