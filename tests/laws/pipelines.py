"""Pipelines of wrappers around the tiny model: what tests build, train and compare them with."""

import torch

import ftrain as ft
from tests.laws import oracle, registry
from tests.laws.models import make_batch, make_model, token_loss
from tests.laws.registry import is_narrow

STEPS = 3


def label(names):
    """Return the names of wrappers as one text, for the name of a test."""
    return "+".join(names) or "plain"


def build(names, *more, criterion=token_loss, **of_model):
    """Return the tiny model, and the step that trains it with the wrappers of these names and then those in `more`."""
    # Autocast leaves float64 alone, so mixed precision is held to float32.
    model = make_model(dtype=torch.float32 if is_narrow(names) else torch.float64, **of_model)
    optimizer = ft.optim.adamw(oracle.LR, weight_decay=oracle.DECAY)
    step = ft.train_step(ft.from_module(model, criterion), optimizer)
    return model, ft.compose(step, *registry.make(names), *more)


def blocks_for(names):
    """Return the number of blocks: as few as the wrappers need, for a test of a compiled step is mostly its capture."""
    return 2 if any("remat" in name for name in names) else 1


def train(step, steps=STEPS, seed=0):
    """Return the state after some steps, and the metrics of each as numbers."""
    state = step.init(seed=seed)
    metrics = []
    for index in range(steps):
        state, values = step(state, make_batch(index))
        metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics


def assert_near(actual, expected, names, narrow=(2e-3, 1e-5)):
    """Check that tensors are equal within the rounding of float64, or with `narrow` as (rtol, atol) of 16 bits."""
    rtol, atol = narrow if is_narrow(names) else (1e-9, 1e-12)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def assert_trees_near(actual, expected, names, **tolerance):
    """Check as `assert_near` does, for trees."""

    def flat(tree):
        return dict(zip(ft.tree.leaf_names(tree), ft.tree.leaves(tree), strict=True))

    assert_near(flat(actual), flat(expected), names, **tolerance)


def train_on(step, batches, seed=0):
    """Return the state after a step with each batch, and the metrics of the last."""
    state, metrics = step.init(seed=seed), {}
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics
