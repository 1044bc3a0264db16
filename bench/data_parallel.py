"""Loops by hand on many ranks with what torch has for them: DDP, ZeroRedundancyOptimizer, FSDP2."""

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
    """`DistributedDataParallel`; at its best with gradients in its buckets, and told that the graph stays the same."""
    options = {"gradient_as_bucket_view": True, "static_graph": True} if task.best else {}
    return loop(task, task.loss, lambda model: DistributedDataParallel(model, **options))


def zero(task: Task) -> Run:
    """DDP, and the optimizer state divided over ranks; at its best with parameters in flat buffers."""

    def optimizer(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        options |= {"lr": task.rate, "weight_decay": 0.0, "parameters_as_bucket_view": task.best}
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options)

    return loop(task, task.loss, DistributedDataParallel, optimizer)


def exchanging(task: Task) -> Run:
    """A bound for level 1: what its ranks cannot do without, and no copy beside it. What it trains is of no use.

    Ranks exchange as many elements as a gather of the parameters, and after the forward pass as many as a scatter of
    the gradients, and each updates its part of the parameters.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    started: list[dist.Work] = []

    def wrap(model: torch.nn.Module) -> Any:
        length = sum(param.numel() for param in model.parameters()) // size
        counts = [0 if other == rank else length for other in range(size)]
        sent, received = torch.ones(2, sum(counts))

        def start() -> dist.Work:
            return dist.all_to_all_single(received, sent, counts, counts, async_op=True)  # type: ignore[no-any-return]

        def forward(*inputs: Any) -> Any:
            start().wait()
            outputs = model(*inputs)
            started.append(start())
            return outputs

        return forward

    def optimizer(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        every = [*params]
        part = task.adamw(every[: len(every) // size], **options)

        def before(*_: Any) -> None:
            started.pop().wait()

        def after(*_: Any) -> None:
            for param in every:
                param.grad = None

        part.register_step_pre_hook(before)
        part.register_step_post_hook(after)
        return part

    return loop(task, task.loss, wrap, optimizer)


def fsdp(task: Task) -> Run:
    """`fully_shard` of each block, then of the rest.

    With the option `compiled`, ``"blocks"`` compiles each block and ``"model"`` the whole model.
    """
    mesh = init_device_mesh(task.device, (dist.get_world_size(),))
    compiled = task.option("compiled")

    def divide(model: Any) -> Any:
        for block in model.blocks:
            if compiled == "blocks":
                block.compile(backend=task.backend)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return torch.compile(model, backend=task.backend) if compiled == "model" else model

    return loop(task, task.loss, divide)
