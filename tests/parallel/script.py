"""What each rank of `test_torchrun` runs: `python -m torch.distributed.run --nproc-per-node=N script.py OUTPUT`."""

import sys

import torch
import torch.distributed as dist

import ftrain as ft
from tests.parallel import models

torch.set_num_threads(1)


def main(output):
    mesh = ft.parallel.mesh()
    wrappers = ft.remat, lambda: ft.accumulate(2), lambda: ft.clip(0.05), lambda: ft.ema(0.8)
    results = {}
    for name, level, more in (
        ("level 0", 0, []),
        ("level 1", 1, []),
        ("level 3", 3, []),
        ("compiled level 3", 3, [ft.compiled(lowering="whole", backend="aot_eager")]),
    ):
        step = models.step_of(*(make() for make in wrappers), ft.sharded(mesh, level), *more)
        state, history = models.train(step)
        results[name] = state.params, history
    if dist.get_rank() == 0:
        torch.save(results, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
