"""Training loops by hand on many ranks with torch: DDP, ZeroRedundancyOptimizer, FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.loops import loop
from bench.tasks import Run, Task


def ddp(task: Task) -> Run:
    """Prepare `DistributedDataParallel`; with `best`, gradients are views of its buckets and the graph is static."""
    options = {"gradient_as_bucket_view": True, "static_graph": True} if task.best else {}
    return loop(task, task.loss, lambda model: DistributedDataParallel(model, **options))


def zero(task: Task) -> Run:
    """Prepare DDP with `ZeroRedundancyOptimizer`; with `best`, parameters are views of flat buffers."""

    def optimizer(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        options |= {"lr": task.rate, "weight_decay": 0.0, "parameters_as_bucket_view": task.best}
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options)

    return loop(task, task.loss, DistributedDataParallel, optimizer)


def exchanging(task: Task) -> Run:
    """Prepare a loop that is a lower bound for the time of level 1: the same communication, but no copies or sums.

    Ranks exchange as many elements as a gather of the parameters before the forward pass, and as many as a scatter of
    the gradients after it. Each rank updates its part of the parameters. The trained model is useless.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    pending: list[dist.Work] = []

    def wrap(model: torch.nn.Module) -> Any:
        length = sum(param.numel() for param in model.parameters()) // size
        counts = [0 if other == rank else length for other in range(size)]
        sent, received = torch.ones(2, sum(counts))

        def start() -> dist.Work:
            return dist.all_to_all_single(received, sent, counts, counts, async_op=True)  # type: ignore[no-any-return]

        def forward(*inputs: Any) -> Any:
            start().wait()
            outputs = model(*inputs)
            pending.append(start())
            return outputs

        return forward

    def optimizer(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        all_params = [*params]
        part = task.adamw(all_params[: len(all_params) // size], **options)

        def wait_for_gradients(*_: Any) -> None:
            pending.pop().wait()

        def drop_gradients(*_: Any) -> None:
            for param in all_params:
                param.grad = None

        part.register_step_pre_hook(wait_for_gradients)
        part.register_step_post_hook(drop_gradients)
        return part

    return loop(task, task.loss, wrap, optimizer)


def fsdp(task: Task) -> Run:
    """Prepare FSDP2: `fully_shard` of each block, then of the whole model.

    The option ``compiled="blocks"`` compiles each block, ``compiled="model"`` the whole model.
    """
    mesh = init_device_mesh(task.device, (dist.get_world_size(),))
    compiled = task.option("compiled")

    def shard(model: Any) -> Any:
        for block in model.blocks:
            if compiled == "blocks":
                block.compile(backend=task.backend)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return torch.compile(model, backend=task.backend) if compiled == "model" else model

    return loop(task, task.loss, shard)
