"""A small model whose parameters are hard to divide, its data, and a few steps of training."""

import torch
from torch import nn

import ftrain as ft
from tests.parallel.ranks import seeded


class Block(nn.Module):
    """LayerNorm, a hidden layer with dropout, a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm, self.hidden, self.out = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.out(self.drop(self.hidden(self.norm(x)).tanh()))


class Model(nn.Module):
    """Blocks, two weights tied across them, BatchNorm, a parameter without axis and one whose first axis is 1."""

    def __init__(self, *, batch_norm=False, blocks=2):
        super().__init__()
        self.inner = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.blocks[-1].out.weight = self.blocks[0].out.weight
        self.norm = nn.BatchNorm1d(6) if batch_norm else nn.Identity()
        self.head, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.3))
        self.bias = nn.Parameter(torch.randn(1, 3))

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale + self.bias


class Small(nn.Module):
    """Two blocks with dropout and a parameter without axis: few operations, for steps that several ranks compile."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)))
        self.head, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return self.head(self.blocks(x)) * self.scale


def loss(model, batch):
    """Return a `Mean` over weights, some of which are 0, a metric that is a tensor, and one that is a `Mean`."""
    outputs = model(batch["x"])
    squares = (outputs - batch["y"]).square().sum(-1) * batch["weight"]
    metrics = {
        "size": outputs.detach().abs().mean(),
        "sizes": ft.Mean(outputs.detach().abs().sum(), torch.tensor(outputs.numel())),
    }
    return ft.Mean(squares.sum(), batch["weight"].sum()), metrics


def plain_loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def batches(count=3, length=12, seed=3):
    """Yield batches whose weights are uneven, and 0 for all examples of some ranks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for _ in range(count):
        weight = draw(length).abs() * torch.arange(length).ge(length // 3)
        yield {"x": draw(length, 5), "y": draw(length, 3), "weight": weight}


def step_of(*wrappers, criterion=loss, optimizer=None, trainable=None, model=Model, **options):
    with seeded(1):
        module = model(**options).double()
    optimizer = optimizer or ft.optim.adamw(1e-2, weight_decay=0.1)
    step = ft.train_step(ft.from_module(module, criterion), optimizer, trainable=trainable)
    return ft.compose(step, *wrappers)


def train(step, data=None, state=None):
    """Return the whole state after all batches, and the metrics of each step as floats."""
    state, history = step.init(seed=5) if state is None else state, []
    for batch in batches() if data is None else data:
        state, metrics = step(state, batch)
        history.append({name: float(metric) for name, metric in metrics.items()})
    return ft.parallel.whole(state), history


def ragged_mean(params, batch):
    """The mean over the first elements of each row, as many as `lengths` says."""
    rows = zip(batch["x"] @ params["w"], batch["lengths"], strict=True)
    return torch.stack([row[:length].square().sum() for row, length in rows]).mean()
