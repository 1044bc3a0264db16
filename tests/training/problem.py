"""A linear regression on random batches, the loop by hand that `fit` must equal, and a comparison of trees."""

import torch

import ftrain as ft


def squares(params, batch):
    """Return the mean squared error, and the largest target as a metric."""
    x, y = batch
    return ((x @ params["w"] - y) ** 2).mean(), {"largest": y.max()}


def params():
    return {"w": torch.tensor([1.0, -1.0, 0.5])}


def batches(count=4, length=4):
    """Return the same random batches in each call: pairs of inputs (length, 3) and targets (length,)."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(length, 3, generator=generator), torch.randn(length, generator=generator)) for _ in range(count)
    ]


def make_step(*wrappers, loss=squares, lr=0.1):
    return ft.compose(ft.train_step(loss, ft.optim.adamw(lr)), *wrappers)


def train_by_hand(step, data):
    """Call the step with each batch, from its first state on; return the last state and the losses."""
    state = step.init(params())
    losses = []
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def fit(step, data, state=None, **options):
    """Call `ft.fit` without progress, from the first state of the step unless another is passed."""
    state = state if state is not None else step.init(params())
    return ft.fit(step, state, data, **{"progress": False, **options})


def assert_bitwise(actual, expected):
    """Check that two trees have the same names, dtypes, shapes and bits."""
    assert ft.tree.leaf_names(actual) == ft.tree.leaf_names(expected)
    for a, b in zip(ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
