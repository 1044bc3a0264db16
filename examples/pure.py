"""Train with no module and no `fit`: parameters are a dict of tensors, the loss a function, the loop four lines.

Shows the basic form that all of ftrain rests on: ``step(state, batch) -> (state, metrics)``. The data is real: 569
tumours described by 30 numbers each (scikit-learn's breast cancer set), a fifth of them held out.

    python examples/pure.py                # a few seconds on two CPU cores
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import Tensor

import ftrain as ft

STEPS, BATCH, HIDDEN = 400, 64, 64

Params = dict[str, Tensor]
Batch = dict[str, Tensor]


def tumours() -> tuple[Batch, Batch]:
    """Features ``(examples, 30)``, scaled by what the training part shows, and labels, 1 for benign."""
    features, labels = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
    train, test = train_test_split(torch.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    scaled = (features - features[train].mean(0)) / features[train].std(0)
    return tuple({"x": scaled[part].float(), "y": labels[part]} for part in (train, test))


def init(key: Tensor) -> Params:
    """Weights of two linear layers, drawn so that variances stay what they are."""
    k1, k2 = ft.random.split(key)
    return {
        "w1": ft.random.normal(k1, (30, HIDDEN)) * (2 / 30) ** 0.5,
        "b1": torch.zeros(HIDDEN),
        "w2": ft.random.normal(k2, (HIDDEN, 2)) * (1 / HIDDEN) ** 0.5,
        "b2": torch.zeros(2),
    }


def loss_fn(params: Params, batch: Batch, *, rng: Tensor | None) -> tuple[ft.Mean, dict[str, ft.Mean]]:
    """Cross-entropy of a network with one hidden layer; dropout in training, where there is a key."""
    hidden = torch.relu(batch["x"] @ params["w1"] + params["b1"])
    if rng is not None:
        hidden = ft.random.dropout(rng, hidden, 0.3)
    logits = hidden @ params["w2"] + params["b2"]
    return ft.losses.cross_entropy(logits, batch["y"]), {"accuracy": ft.losses.accuracy(logits, batch["y"])}


def main() -> None:
    """Train, showing a line now and then, and print the accuracy on the held-out tumours."""
    train, test = tumours()
    step = ft.train_step(loss_fn, ft.optim.adamw(ft.schedules.warmup_cosine(3e-3, 40, STEPS), weight_decay=0.1))
    state = step.init(init(ft.random.key(0)), seed=0)
    for k in range(STEPS):
        rows = ft.random.randint(ft.random.fold_in(ft.random.key(1), k), (BATCH,), 0, len(train["y"]))
        state, metrics = step(state, ft.tree.map(lambda leaf: leaf[rows], train))  # noqa: B023
        if (k + 1) % 50 == 0:
            print(f"step {k + 1:3d}  loss {metrics['loss']:.4f}  accuracy {metrics['accuracy']:.2f}")
    result = ft.evaluate(ft.eval_step(loss_fn), state, [test])
    print(f"test accuracy {result['accuracy']:.2%} on {len(test['y'])} held-out tumours")


if __name__ == "__main__":
    main()
