"""Train with no module and no `fit`: parameters are a dict of tensors, the loss is a function, the loop is yours.

``python examples/pure.py`` trains a classifier of 569 tumours with a pure step, and holds a fifth of them out.
"""

import argparse
from collections.abc import Iterator

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import Tensor

import ftrain as ft

STEPS, BATCH, HIDDEN = 200, 64, 32


def tumours() -> tuple[Tensor, ...]:
    """Features ``(examples, 30)`` to train on and held out, and labels ``(examples,)``, 1 for benign, of both."""
    x, y = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
    train_x, test_x, train_y, test_y = train_test_split(x.float(), y, test_size=0.2, stratify=y, random_state=0)
    mean, std = train_x.mean(0), train_x.std(0)
    return (train_x - mean) / std, (test_x - mean) / std, train_y, test_y


def batches(x: Tensor, y: Tensor, key: Tensor) -> Iterator[dict[str, Tensor]]:
    """Batches of random examples, the same ones for the same key."""
    for k in range(STEPS):
        rows = ft.random.randint(ft.random.fold_in(key, k), (BATCH,), 0, len(y))
        yield {"x": x[rows], "y": y[rows]}


def loss_fn(params: dict[str, Tensor], batch: dict[str, Tensor], *, rng: Tensor | None) -> tuple[ft.Mean, dict]:
    """Cross-entropy of a network with one hidden layer; with dropout in training, where there is a key."""
    hidden = torch.relu(batch["x"] @ params["w1"] + params["b1"])
    hidden = hidden if rng is None else ft.random.dropout(rng, hidden, 0.3)
    logits = hidden @ params["w2"] + params["b2"]
    return ft.losses.cross_entropy(logits, batch["y"]), {"accuracy": ft.losses.accuracy(logits, batch["y"])}


def main() -> None:
    """Train, print a line now and then, and at last the accuracy on the held-out tumours."""
    train_x, test_x, train_y, test_y = tumours()
    init, order = ft.random.split(ft.random.key(0))
    params = {"w1": ft.random.normal(init, (30, HIDDEN)) / 4, "b1": torch.zeros(HIDDEN)}
    params |= {"w2": torch.zeros(HIDDEN, 2), "b2": torch.zeros(2)}
    step = ft.train_step(loss_fn, ft.optim.adamw(3e-3, weight_decay=0.1))
    state = step.init(params, seed=0)

    for batch in batches(train_x, train_y, order):
        state, metrics = step(state, batch)
        if state.step % 25 == 0:
            print(f"step {state.step:3d}  loss {metrics['loss']:.4f}  accuracy {metrics['accuracy']:.2f}")
    result = ft.evaluate(ft.eval_step(loss_fn), state, [{"x": test_x, "y": test_y}])
    print(f"test accuracy {result['accuracy']:.2%} on {len(test_y)} held-out tumours")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
