"""The program that torchrun starts on each rank in `test_kill_ranks`: a run that resumes when it is started again."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ftrain as ft

torch.set_num_threads(1)
STEPS, BATCH = 12, 4


def report(directory, step):
    """Write the process id and the number of steps since its start to a file, atomically."""
    path = directory / f"rank{dist.get_rank()}"
    path.with_suffix(".new").write_text(f"{os.getpid()} {step}")
    os.replace(path.with_suffix(".new"), path)


class Slow:
    """Batches that take a while, so that there is time to kill the process; each is reported."""

    def __init__(self, directory):
        self.directory = directory
        samples = [{"x": torch.arange(4.0) + number} for number in range(24)]
        self.loader = ft.data.loader(samples, BATCH, seed=5)
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    def __iter__(self):
        for number, batch in enumerate(self.loader):
            report(self.directory, number)
            time.sleep(0.02)
            yield batch


def main(directory):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3))
    loss = ft.from_module(module, lambda model, batch: model(batch["x"]).square().mean())
    wrappers = ft.accumulate(2), ft.clip(1.0), ft.ema(0.9), ft.sharded(ft.parallel.mesh(timeout=60))
    step = ft.compose(ft.train_step(loss, ft.optim.adamw(0.05)), *wrappers)
    state, history = ft.fit(
        step,
        step.init(seed=3),
        Slow(directory),
        steps=STEPS,
        checkpoints=ft.Checkpoints(directory / "run", every=2, keep=2),
        log_every=2,
        loggers=[ft.loggers.jsonl(directory / "log.jsonl")],
        progress=False,
    )
    whole = ft.parallel.whole(state)
    if dist.get_rank() == 0:
        records = [{name: value for name, value in record.items() if name != "seconds"} for record in history]
        torch.save((whole, records), directory / "end.new")
        os.replace(directory / "end.new", directory / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
