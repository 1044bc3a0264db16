"""Find out what makes the step of a small GPT faster, or smaller in memory: the techniques of performance guides.

Prints what its memory holds, the effect of each technique (alone, and added to those that help), hints about its
speed, and the fastest microbatch and rematerialisation within half of that memory. Model and text are those of
`train_lm.py`.

    python examples/ladder.py            # a few minutes on a laptop CPU, most of them to compile
    python examples/ladder.py --techniques "gradient checkpointing" donated() --rounds 5

Draws ``anatomy.png``, memory over the operations of the step, and ``ladder.png``, speed against memory, into ``--out``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from train_lm import GPT, Parser, RandomWindows, as_tensor, predict_bytes, standard_library

import ftrain as ft


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    add = parser.add
    add("batch", 16, "windows in a batch")
    add("length", 128, "bytes in a window")
    add("width", 128, "features of a byte; a multiple of twice the heads")
    add("layers", 6, "number of blocks")
    add("heads", 2, "attention heads")
    add("rounds", 9, "how often each technique is timed")
    add("share", 0.5, "share of the step's memory to tune for")
    add("device", ft.backends.default().name, "where to run")
    parser.add_argument("--techniques", nargs="*", help="names or methods of the techniques to try; default: all")
    add("out", Path("runs/ladder"), "folder for the drawings")
    options = parser.parse_args()
    parser.require_positive(options, "batch", "length", "layers", "rounds", "share")
    return options


def main() -> None:
    """Print the anatomy, the ladder with its hints, and the trials for half the memory; draw the first two."""
    o = options()
    o.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = GPT(width=o.width, layers=o.layers, heads=o.heads)
    step = ft.train_step(ft.from_module(model, predict_bytes), ft.optim.adamw(1e-3, weight_decay=0.1))
    state = step.init(device=o.device)
    data = RandomWindows(as_tensor(standard_library()[0]), o.batch, o.length, seed=0)
    batch = next(iter(data))

    anatomy = ft.anatomy(step, state, batch)
    print(anatomy, end="\n\n")
    anatomy.plot(o.out / "anatomy.png")

    tokens = {"tokens": lambda batch: batch["bytes"].shape[0] * (batch["bytes"].shape[1] - 1)}
    ladder = ft.ladder(step, state, batch, data=data, techniques=o.techniques, throughput=tokens, rounds=o.rounds)
    print(ladder, end="\n\n")
    ladder.plot(o.out / "ladder.png")

    trials = ft.trials(step, state, batch, memory=int(o.share * anatomy.peak), rounds=o.rounds)
    print(f"{trials}\n\n{trials.step}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("ended by Ctrl-C") from None
