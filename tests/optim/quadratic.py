"""A quadratic loss with a known gradient, for optimizers that are compared with formulas in the tests."""

import math

import torch

import ftrain as ft
from ftrain import tree

F64 = torch.float64


def make_params():
    draw = torch.Generator().manual_seed(3)
    shapes = {"conv": (4, 3, 2, 2), "norm": (4,), "out": (2, 4), "scale": (), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=draw, dtype=F64) for name, shape in shapes.items()}


def quadratic(params, batch):
    """Return a loss whose gradient is `params * batch + 1`."""
    return sum((leaf.square() * batch / 2 + leaf).sum() for leaf in params.values())


def gradient(params, batch):
    """Return the gradient of `quadratic` in the parameters."""
    return {name: leaf * batch + 1 for name, leaf in params.items()}


def batches(steps):
    return [torch.tensor(0.5 + 0.1 * math.sin(k), dtype=F64) for k in range(steps)]


def train(optimizer, steps, *wrappers):
    """Return the state after some steps on `quadratic`."""
    step = ft.compose(ft.train_step(quadratic, optimizer), *wrappers)
    state = step.init(make_params())
    for batch in batches(steps):
        state, _ = step(state, batch)
    return state


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def assert_equal(actual, expected):
    for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert torch.equal(a, b)
