"""What each rank of `test_torchrun` runs: `python -m torch.distributed.run --nproc-per-node=N script.py OUTPUT`."""

import sys

import torch
import torch.distributed as dist

import ftrain as ft
from tests.parallel import models

torch.set_num_threads(1)

STEPS = {
    "level 0": (0, []),
    "level 3": (3, []),
    "level 3, compiled": (3, [ft.compiled(lowering="whole", backend="aot_eager")]),
}
"""Name -> level, and further wrappers."""


def optimizer():
    """Return one that needs of each leaf something else: the matrix, means, a norm, blocks, places, single elements."""
    optimizers = {
        "muon": ft.optim.muon(0.01, ns_steps=2),
        "adafactor": ft.optim.adafactor(0.01),
        "lamb": ft.optim.lamb(0.01),
        "blocks": ft.optim.adamw_8bit(0.01, block=4, min_size=1),
        "places": ft.optim.adamw(0.01, state_dtype="bf16"),
        "rest": ft.optim.adamw(0.01, weight_decay=0.1),
    }
    patterns = {
        "muon": ["blocks.*.out.weight", "blocks.0.hidden.weight"],
        "adafactor": ["inner.*"],
        "lamb": ["blocks.1.hidden.weight"],
        "blocks": ["head.weight"],
        "places": ["blocks.*.hidden.bias"],
    }
    return ft.optim.partition(optimizers, patterns)


def train(name):
    """Return the whole state after the steps, and their metrics."""
    level, wrappers = STEPS[name]
    sharded = ft.sharded(ft.parallel.mesh(), level)
    wrappers = ft.remat(), ft.accumulate(2), ft.clip(0.05), ft.ema(0.8), sharded, *wrappers
    return models.train(models.step_of(*wrappers, optimizer=optimizer()))


def main(output):
    results = {}
    for name in STEPS:
        state, history = train(name)
        results[name] = state.params, history
    if dist.get_rank() == 0:
        torch.save(results, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
