"""Bytes, times and losses of `ft.sharded(reduce=...)`: handwritten digits on ranks that gloo connects.

    torchrun --nproc-per-node=4 -m bench.compression

Every method trains the same MLP for 300 steps on the same batches of 256 images, drawn from four fifths of
scikit-learn's digits. For `docs/parallel.md`, the first rank prints the bytes that a rank sends in a step (ring
all-reduces and gathers, as `ft.anatomy` predicts them), the median time of a step, and loss and accuracy on the other
images. Ranks on one machine communicate through its memory: the times show what compression costs, not what it saves on
a network.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ftrain as ft

STEPS, BATCH, HIDDEN = 300, 256, 256
METHODS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "powersgd(8)": ft.parallel.powersgd(8),
    "powersgd(2)": ft.parallel.powersgd(2),
    "sign": ft.parallel.sign(),
}
OPTIMIZERS = {
    "sgd": lambda: ft.optim.sgd(ft.schedules.cosine(0.1, STEPS), momentum=0.9),
    "adamw": lambda: ft.optim.adamw(ft.schedules.cosine(1e-3, STEPS)),
}


def main() -> None:
    """Train with every method and optimizer, and print bytes, time, loss and accuracy."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = ft.parallel.mesh()
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16 - 0.5  # pixels are 0 to 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order.split([len(order) * 4 // 5, len(order) - len(order) * 4 // 5])
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 10))
    for optimizer, make_optimizer in OPTIMIZERS.items():
        for name, reduce in METHODS.items():
            step = ft.compose(
                ft.train_step(ft.from_module(model, criterion), make_optimizer()), ft.sharded(mesh, 0, reduce)
            )
            state, generator = step.init(seed=0), torch.Generator().manual_seed(1)
            seconds = []
            for _ in range(STEPS):
                indices = train[torch.randint(len(train), (BATCH,), generator=generator)]
                batch = {"x": images[indices], "y": labels[indices]}
                start = time.perf_counter()
                state, _ = step(state, batch)
                seconds.append(time.perf_counter() - start)
            nbytes = sum(transfer.sent for transfer in ft.anatomy(step, state, batch, measure=False).traffic)
            metrics = ft.eval_step(step.loss)(state, {"x": images[test], "y": labels[test]})
            if dist.get_rank() == 0:
                print(
                    optimizer,
                    name,
                    nbytes,
                    f"{statistics.median(seconds) * 1e3:.2f} ms",
                    f"{metrics['loss']:.4f} {metrics['accuracy']:.4f}",
                    flush=True,
                )


def criterion(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Return the mean cross-entropy, and the accuracy as a metric."""
    outputs = model(batch["x"])
    correct = (outputs.argmax(1) == batch["y"]).sum()
    loss = nn.functional.cross_entropy(outputs, batch["y"], reduction="sum")
    count = torch.tensor(float(len(outputs)))
    return ft.Mean(loss, count), {"accuracy": ft.Mean(correct, count)}


if __name__ == "__main__":
    main()
