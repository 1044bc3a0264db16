"""Models of transformers on four processes give the results of torch's DistributedDataParallel and AdamW."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import ftrain as ft
from tests.faults.forks import quiet_forks
from tests.parallel.processes import started
from tests.parallel.ranks import seeded
from tests.parallel.results import assert_leaves_near
from tests.parallel.transformers_models import TINY

pytestmark = quiet_forks
NAMES, LEVELS = ("gpt2", "bert", "llama"), (0, 3)
ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
"""The gradient of some biases of attention is 0 up to rounding, which a small eps would magnify."""


def batches(count=3, length=8):
    """Yield batches without padding, so that a mean over ranks of means is that of all tokens."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = torch.randint(64, (length, 8), generator=generator)
        yield {"input_ids": ids, "labels": ids.roll(-1, 1)}


def entropy(model, batch):
    """Return the mean over tokens; the loss of the causal models themselves is computed in float32."""
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def by_torch(module):
    """Return the losses, which are means over ranks, and the parameters of a copy that torch trains."""
    module = copy.deepcopy(module)
    parallel, losses = DistributedDataParallel(module), []
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    for batch in batches():
        optimizer.zero_grad()
        rows = {name: tensor.chunk(dist.get_world_size())[dist.get_rank()] for name, tensor in batch.items()}
        loss = entropy(parallel, rows)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses, {name: leaf.detach() for name, leaf in module.named_parameters()}


def by_ftrain(module, mesh, level):
    optimizer = ft.optim.adamw(**ADAMW, decay_mask=lambda name, leaf: True)
    step = ft.compose(ft.train_step(ft.from_module(module, entropy), optimizer), ft.sharded(mesh, level))
    state, losses = step.init(), []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, ft.parallel.whole(state).params


def model(name):
    with seeded(1):
        module = TINY[name]().double().train()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return module


def trained(tell, rank, directory, modules):
    mesh = ft.parallel.mesh()
    results = [(by_torch(module), [by_ftrain(module, mesh, level) for level in LEVELS]) for module in modules]
    torch.save(results, directory / f"{rank}.pt")


@pytest.mark.exhaustive  # `test_models` holds them to plain torch over the whole batch, on threads.
def test_models_of_transformers_end_where_distributed_data_parallel_does(tmp_path):
    modules = [model(name) for name in NAMES]
    with started(4, trained, tmp_path, modules) as ranks:
        assert [rank.wait() for rank in ranks] == [0] * 4
    for rank in range(4):
        for (losses, params), by_level in torch.load(tmp_path / f"{rank}.pt"):
            assert losses[-1] != losses[0]
            for level_losses, level_params in by_level:
                assert level_losses == pytest.approx(losses, rel=1e-12)
                assert_leaves_near(level_params, params)
