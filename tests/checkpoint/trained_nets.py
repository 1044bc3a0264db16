"""A small net with buffers and dropout, a step of it, and its state after some steps."""

import torch
from torch import nn

import ftrain as ft


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def squares(model, batch):
    return model(batch).square().mean()


def make(module=None):
    """Return a step of the module or, by default, of a new net; its state has averages too."""
    step = ft.train_step(ft.from_module(module or net(), squares), ft.optim.adamw(0.1))
    return ft.compose(step, ft.ema(0.9), ft.clip(1.0))


def trained(step=None, steps=2):
    """Return the state of a step, by default a new one, after some steps."""
    step = step or make()
    state = step.init(seed=1)
    for index in range(steps):
        state, _ = step(state, torch.randn(3, 4, generator=torch.Generator().manual_seed(index)))
    return state
