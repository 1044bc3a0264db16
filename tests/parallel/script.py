"""What each rank of `test_torchrun` runs.

python -m torch.distributed.run --nproc-per-node=N script.py OUTPUT [NAME ...]
"""

import atexit
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ftrain as ft
from tests.parallel import models

torch.set_num_threads(1)

STEPS = {
    "level 0": (0, False),
    "level 3": (3, False),
    "level 3, compiled": (3, True),
}
"""Name -> level, and whether the step is compiled."""


def optimizer():
    """Return an optimizer whose parts need different things of a leaf.

    They are the matrix, the means of rows and columns, the norm, blocks, the places of elements, or single elements.
    """
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
    level, is_compiled = STEPS[name]
    sharded = ft.sharded(ft.parallel.mesh(), level)
    # Made after the mesh: the modules of torch that it imports must not keep the process group alive.
    compiled = [ft.compiled(lowering="whole", backend="aot_eager")] if is_compiled else []
    wrappers = ft.remat(), ft.accumulate(2), ft.clip(0.05), ft.ema(0.8), sharded, *compiled
    return models.train(models.step_of(*wrappers, optimizer=optimizer()))


def main(output, names):
    results = {}
    for name in names:
        state, history = train(name)
        results[name] = state.params, history
    if dist.get_rank() == 0:
        torch.save(results, output)


def write_threads(output):
    """Write whether there is a process group, and which threads of gloo run."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    threads = [name for name in names if "gloo" in name]
    output.write_text(f"{'in a group' if dist.is_initialized() else 'left'}, with threads {threads}")


if __name__ == "__main__":
    # The function that is registered first is called last.
    atexit.register(write_threads, Path(f"{sys.argv[1]}.end-of-{os.environ['RANK']}"))
    main(sys.argv[1], sys.argv[2:] or STEPS)
