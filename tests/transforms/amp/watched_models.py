"""A model whose parts overflow and underflow in float16, and steps with `with_amp(watch=True)` that train a model."""

import torch
from torch import nn

import ftrain as ft


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class FaultyNet(nn.Module):
    """The output of part 1.2 overflows in float16, and that of part 3.1 vanishes."""

    def __init__(self, large=1e6, small=1e-9):
        super().__init__()
        wide = nn.Linear(8, 8)
        nn.init.ones_(wide.weight)
        self.parts = nn.ModuleList(
            [
                nn.Linear(8, 8),
                nn.Sequential(nn.Dropout(0.25), wide, Times(large)),
                nn.Tanh(),
                nn.Sequential(nn.Linear(8, 8), Times(small)),
                nn.Linear(8, 4),
            ]
        )

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def criterion(model, batch):
    return ft.Mean(model(batch).float().nan_to_num().square().sum(), torch.tensor(float(len(batch))))


def build(*outer, model=None, dtype="fp16", watch=True, inner=()):
    """Return a step with the wrappers `inner`, with_amp and `outer`, of a `FaultyNet` unless a model is passed."""
    torch.manual_seed(0)
    loss_fn = ft.from_module(FaultyNet() if model is None else model, criterion)
    step = ft.train_step(loss_fn, ft.optim.sgd(0.1, momentum=0.9))
    return ft.compose(step, *inner, ft.with_amp(dtype, watch=watch), *outer)


def make_batches(count):
    return list(torch.randn(count, 8, 8, generator=torch.Generator().manual_seed(1)).abs().unbind())


def run(step, steps):
    """Return the state after some steps, and the metrics of each step."""
    state, history = step.init(), []
    for batch in make_batches(steps):
        state, metrics = step(state, batch)
        history.append(metrics)
    return state, history


def metrics_of_one_step(*outer, **options):
    _, (metrics,) = run(build(*outer, **options), 1)
    return metrics


def shares_in(metrics):
    """Return the shares of overflows and underflows among metrics, as Python numbers."""
    return {name: float(value) for name, value in metrics.items() if "/" in name}


def parts_in(metrics):
    """Return the names of the parts that have a share among metrics."""
    return {name.partition("/")[2] for name in metrics if "/" in name}
