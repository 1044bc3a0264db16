"""Train a small convolutional network with batch normalisation on real handwritten digits, to 99% of a held-out test.

Shows that a module with running statistics needs no code for them: `ft.from_module` turns it into a pure loss, the
statistics are in ``state.buffers``, training steps update them, and evaluation reads them.

    python examples/digits.py              # a few seconds on a laptop CPU
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ftrain as ft

EPOCHS = 8
BATCH = 64


def convnet() -> nn.Module:
    """Return a network that maps images ``(batch, 1, 8, 8)`` to logits ``(batch, 10)``."""

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *stage(1, 32),
        *stage(32, 32),
        nn.MaxPool2d(2),
        *stage(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 2 * 2, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the 1,797 digits of scikit-learn: four fifths to train on, one fifth held out, stratified by class."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16.0, labels, test_size=0.2, stratify=labels, random_state=0)
    train_x, test_x = (torch.as_tensor(array, dtype=torch.float32).reshape(-1, 1, 8, 8) for array in split[:2])
    train_y, test_y = (torch.as_tensor(array) for array in split[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def classify(model: nn.Module, batch: list[Tensor]) -> tuple[ft.Mean, dict[str, ft.Mean]]:
    """Return the cross-entropy, and the accuracy as a metric."""
    images, labels = batch
    logits = model(images)
    return ft.losses.cross_entropy(logits, labels), {"accuracy": ft.losses.accuracy(logits, labels)}


def main() -> None:
    """Train, and print the accuracy on the held-out digits."""
    torch.manual_seed(0)
    train, test = digits()
    loader = ft.data.loader(train, BATCH, seed=0)
    steps = EPOCHS * len(loader)

    loss_fn = ft.from_module(convnet(), classify)
    schedule = ft.schedules.warmup_cosine(3e-3, warmup=steps // 10, total=steps)
    step = ft.compose(
        ft.train_step(loss_fn, ft.optim.adamw(schedule, weight_decay=0.05)),
        ft.clip(1.0),
    )
    print(step, end="\n\n")

    start = time.perf_counter()
    state, _ = ft.fit(step, step.init(seed=0), loader, steps=steps)
    result = ft.evaluate(ft.eval_step(loss_fn), state, [test[:]])
    seconds = time.perf_counter() - start
    done = int(state.step)  # Fewer than `steps` after Ctrl-C.
    print(f"\ntest accuracy {result['accuracy']:.2%} on {len(test)} held-out digits, {done} steps in {seconds:.0f} s")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
