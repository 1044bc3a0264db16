"""A loop by hand that trains adapters of peft, with clipping; with `best`, the loss is compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench import ours
from bench.tasks import Run, Task


def make(task: Task) -> Run:
    """Prepare the loop with the fused AdamW. The adapters start with the same values as those of ftrain."""
    import peft

    model, batch, step = task.model(), task.batch(), ours.adapted_step(task)
    start = step.init(device=task.device).params
    targets = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "blocks." in name]
    model = peft.inject_adapter_in_model(
        peft.LoraConfig(r=ours.RANK, lora_alpha=ours.RANK, target_modules=targets), model
    )
    trained = {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad}
    with torch.no_grad():
        for name, leaf in trained.items():
            leaf.copy_(start[name.replace(".default", "")])
    optimizer = task.adamw(trained.values(), fused=True)

    def loss_of(batch: object) -> Tensor:
        return task.loss(model, batch)

    loss_fn = torch.compile(loss_of, backend=task.backend) if task.best else loss_of

    def run() -> Tensor:
        loss = loss_fn(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), task.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run
