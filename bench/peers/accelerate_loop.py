"""Accelerate: the loop of its documentation.

With `best`, the optimizer is fused, model and loss are compiled, and on many ranks DDP has its best options. With the
option `fused` the same without compilation.
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
    from accelerate.utils import DistributedDataParallelKwargs

    # The precision is global in a process; an earlier case may have set another.
    AcceleratorState._reset_state(reset_partial_state=True)
    precision = "bf16" if task.precision == "bf16" else "no"
    fused = task.option("fused", task.best)
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=fused, static_graph=fused)
    accelerator = Accelerator(mixed_precision=precision, cpu=task.device == "cpu", kwargs_handlers=[options])
    module, batch = task.model(), task.batch()
    model, optimizer = accelerator.prepare(
        module, task.adamw(module.parameters(), **({"fused": True} if fused else {}))
    )

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
