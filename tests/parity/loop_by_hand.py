"""The usual training loop of torch, with the models and batches that steps are compared on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from tests.parity.fifty_steps import F64, STEPS, TIGHT

# Where sums are taken in another order: the rounding difference of the first step grows in the steps after it.
REORDERED = {"rtol": 1e-12, "atol": 1e-13}

CLASSES = 3
WRAPPERS = {
    "eager": lambda: (),
    "donated": lambda: (ft.donated(),),
    "compiled": lambda: (ft.compiled(backend="eager"),),
}


class Conv(nn.Module):
    """A small convolutional net with the running statistics of BatchNorm."""

    def __init__(self):
        super().__init__()
        # No bias before the norm: its gradient is 0 but for rounding errors, which AdamW would scale to full steps.
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, stride=2), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.second(F.relu(self.norm(self.first(x))))).flatten(1))


def make_mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def seeded(make, dtype=F64):
    """Return the module that `make` builds, with the same initial parameters in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().to(dtype)


def make_batches(model_name, size=8, steps=STEPS, dtype=F64):
    shape = (size, 6) if model_name == "mlp" else (size, 1, 6, 6)
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(shape, generator=draw, dtype=F64).to(dtype),
            "y": torch.randint(CLASSES, (size,), generator=draw),
        }
        for _ in range(steps)
    ]


MODELS = {"mlp": make_mlp, "conv": Conv}
models = pytest.mark.parametrize("model_name", MODELS)


def criterion(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)


def train_by_hand(model, batches, *, clip=None, make_optimizer=adamw, after=None):
    """Train a copy of the model with the usual torch loop, and return the copy and its losses.

    `clip` gets the parameters before each update, and `after` the model after it.
    """
    model = copy.deepcopy(model).train()
    optimizer = make_optimizer(model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = criterion(model, batch)
        loss.backward()
        if clip:
            clip(model.parameters())
        optimizer.step()
        if after:
            after(model)
        losses.append(loss.detach())
    return model, losses


def run(step, state, batches):
    """Make one step with each batch, and return the last state and the losses."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, losses


def assert_same_model(model, state, tolerance=TIGHT):
    """Assert that the state has the parameters and buffers of the module."""
    torch.testing.assert_close(state.params, {n: p.detach() for n, p in model.named_parameters()}, **tolerance)
    torch.testing.assert_close(state.buffers, dict(model.named_buffers()), **tolerance)
