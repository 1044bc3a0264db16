"""The model that is trained on the device of `toy.py`, and comparisons with its training on the CPU."""

import functools

import torch
from torch import nn

import ftrain as ft


def check_adder(checks):
    """Return a decorator that adds a check, which is a function that raises an error if it fails, to a dict by name.

    The arguments of a check are the name of the device and its module, as in ``torch.<name>``.
    """

    def add(function):
        checks[function.__name__] = function
        return function

    return add


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.1)

    def forward(self, x):
        return self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


def criterion(model, batch, *, rng):
    # An evaluation has no key, and no dropout.
    kept = batch if rng is None else ft.random.dropout(rng, batch, 0.2)
    return (model(kept).float() ** 2).mean()


def squares(model, batch):
    return model(batch).square().mean()


def make(*wrappers):
    torch.manual_seed(0)
    optimizer = ft.optim.adamw(ft.schedules.warmup_cosine(1e-2, 3, 30), weight_decay=0.1)
    loss_fn = ft.from_module(Net(), criterion)
    return ft.compose(ft.train_step(loss_fn, optimizer), ft.clip(1.0), ft.ema(0.9), ft.skip_nonfinite(), *wrappers)


def batches(count=5):
    return list(torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(1)).unbind())


def train(device, *wrappers):
    step = make(*wrappers)
    state, history = ft.fit(step, step.init(device=device), batches(), progress=False)
    return state, history["loss"]


@functools.cache
def plain_run(device, microbatches=1):
    """Return the state and the losses of a run that several checks read."""
    return train(device, ft.accumulate(microbatches)) if microbatches > 1 else train(device)


def differing_leaves(actual, expected):
    """Return the names of the leaves whose bits differ, or that are on the device meta."""
    pairs = zip(ft.tree.leaf_names(actual), ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True)
    return [name for name, a, b in pairs if not torch.equal(a.cpu(), b.cpu()) or a.device.type == "meta"]


def assert_bitwise(actual, expected):
    """Assert that two trees, which may be on different devices, have the same bits."""
    names = differing_leaves(actual, expected)
    assert not names, f"these leaves differ: {names}"


def device_types(state):
    """Return the types of the devices of a state's leaves, except for the step and the key, which are on the host."""
    return {leaf.device.type for leaf in ft.tree.leaves((state.params, state.buffers, state.opt_state, state.slots))}


def assert_near(actual, expected, rtol=2e-5, atol=2e-6):
    """Assert that two trees, or two lists of numbers, are equal within rounding; they may be on different devices."""
    if isinstance(actual, list):
        actual, expected = torch.tensor(actual), torch.tensor(expected)
    for a, b in zip(ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a.cpu().double(), b.cpu().double(), rtol=rtol, atol=atol)
