"""Measure the memory of steps with and without `linear_cross_entropy`.

python -m tests.losses.memory_script FOLDER LOWERING ROWS CLASSES WIDTH

It runs in a new process, because the peak memory of a process never falls; the step that needs less memory comes first.
The trace of step N, which has every allocation of a tensor, is written to N.json in the folder. The peak bytes of the
process and the loss of each step are written to steps.json.
"""

import json
import sys
from pathlib import Path

import torch

import ftrain as ft

COMPILED = ft.compiled(lowering="whole", donate=True)


def profiler():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def loss_of_logits(params, batch):
    return ft.losses.cross_entropy(batch["x"] * params["scale"] @ params["weight"].T, batch["labels"])


def loss_by_chunks(params, batch):
    return ft.losses.linear_cross_entropy(batch["x"] * params["scale"], params["weight"], batch["labels"])


def allocate_what_libraries_keep(width):
    """Run both losses once: the memory that the libraries and the profiler allocate once is not measured."""
    hidden, labels = torch.ones(64, width, requires_grad=True), torch.arange(64)
    with profiler():
        ft.losses.linear_cross_entropy(hidden, hidden, labels).total.backward()
        ft.losses.cross_entropy(hidden @ hidden.T, labels).total.backward()


def peak_of_process():
    return ft.backends.of(torch.device("cpu")).memory().peak


def measure(loss, wrapper, rows, classes, width, trace):
    """Run a step, write its trace to a file, and return the peak bytes of the process in it, and the loss."""
    step = wrapper(ft.train_step(loss, ft.optim.sgd(0.1)))
    generator = torch.Generator().manual_seed(0)
    params = {"weight": torch.randn(classes, width, generator=generator).div_(8), "scale": torch.ones(width)}
    batch = {"x": torch.randn(rows, width, generator=generator), "labels": torch.arange(rows) * 17}
    state = step.init(params, seed=0)
    if wrapper is COMPILED:  # Memory for compiling is not measured.
        state, _ = step(state, batch)
    before = peak_of_process()
    with profiler() as profile:
        state, metrics = step(state, batch)
    peak = peak_of_process() - before
    profile.export_chrome_trace(str(trace))
    return peak, float(metrics["loss"])


def main(folder, lowering, *sizes):
    torch.set_num_threads(1)
    rows, classes, width = map(int, sizes)
    cases = {
        "eager": [(loss_by_chunks, ft.donated()), (loss_of_logits, ft.donated())],
        "compiled": [(loss_by_chunks, COMPILED)],
    }
    allocate_what_libraries_keep(width)
    steps = [
        measure(loss, wrapper, rows, classes, width, Path(folder, f"{number}.json"))
        for number, (loss, wrapper) in enumerate(cases[lowering])
    ]
    Path(folder, "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
