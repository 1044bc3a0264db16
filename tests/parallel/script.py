"""What each rank of `test_torchrun` runs: `python -m torch.distributed.run --nproc-per-node=N script.py OUTPUT`."""

import sys

import torch
import torch.distributed as dist

import ftrain as ft
from tests.parallel import models

torch.set_num_threads(1)


STEPS = {
    "level 0": (0, []),
    "level 1": (1, []),
    "level 3": (3, []),
    "level 3, compiled": (3, [ft.compiled(lowering="whole", backend="aot_eager")]),
}
"""Name -> level, and further wrappers."""


def main(output):
    mesh, results = ft.parallel.mesh(), {}
    for name, (level, wrappers) in STEPS.items():
        wrappers = ft.remat(), ft.accumulate(2), ft.clip(0.05), ft.ema(0.8), ft.sharded(mesh, level), *wrappers
        state, history = models.train(models.step_of(*wrappers))
        results[name] = state.params, history
    if dist.get_rank() == 0:
        torch.save(results, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
