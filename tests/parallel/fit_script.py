"""What each rank of `test_fit_under_torchrun` runs: `fit_script.py DIRECTORY [EVENT RANK]`.

At step 4 the event happens on one rank: a signal, or an error of its data. Each rank writes how it ended.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ftrain as ft
from tests.parallel import models

torch.set_num_threads(1)


class Data:
    """Batches; before the fourth one the event happens."""

    def __init__(self, event, rank):
        self.event = event if dist.get_rank() == rank else ""

    def __iter__(self):
        for number, batch in enumerate(models.batches(8), 1):
            if number == 4 and self.event == "error":
                raise OSError("disk gone")
            if number == 4 and self.event:
                os.kill(os.getpid(), getattr(signal, self.event))
            yield batch


def main(directory, event="", rank="0"):
    step = models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh()))
    output = directory / f"{event or 'end'}{dist.get_rank()}.pt"
    try:
        checkpoints = ft.Checkpoints(directory / "run", every=3)
        data = Data(event, int(rank))
        state, history = ft.fit(step, step.init(seed=5), data, checkpoints=checkpoints, progress=False)
        torch.save((ft.parallel.whole(state), history["loss"]), output)
        dist.destroy_process_group()
    except BaseException as error:
        text = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
        torch.save((text, int(error.result.state.step)), output)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
