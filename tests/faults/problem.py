"""A linear regression that is small enough to check by hand, and functions that all fault tests use."""

from contextlib import contextmanager

import pytest
import torch

import ftrain as ft


def params():
    return {"w": torch.ones(3), "b": torch.zeros(())}


def batch(length=4):
    return {"x": torch.arange(3.0 * length).reshape(length, 3) / 10, "y": torch.zeros(length)}


def squares(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def make(loss_fn=squares, *wrappers, optimizer=None, **options):
    return ft.compose(ft.train_step(loss_fn, optimizer or ft.optim.adamw(0.1), **options), *wrappers)


def run(loss_fn=squares, *wrappers, inputs=None, **options):
    """Build a step, take one step, and return the new state and the metrics."""
    step = make(loss_fn, *wrappers, **options)
    return step(step.init(params()), batch() if inputs is None else inputs)


@contextmanager
def failing(error_class, *pieces):
    """Context that must raise an error of exactly this class, whose message has all the pieces."""
    with pytest.raises(error_class) as caught:
        yield caught
    assert type(caught.value) is error_class
    missing = [piece for piece in pieces if piece not in str(caught.value)]
    assert not missing, f"{missing} not in the message: {caught.value}"
