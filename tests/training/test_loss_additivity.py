"""A run that splits its batches warns of a loss that is no mean over examples, and of no other."""

import pytest
import torch

import ftrain as ft
from tests.training.out_of_memory import (
    batches,
    fit,
    loss,
    loss_that_fits,
    loss_without_dropout,
    out_of_memory_at,
    params,
    unweighted_loss,
)
from tests.training.problem import assert_bitwise


def make_step(loss, *wrappers):
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True), *wrappers)


def summed_loss(params, batch):
    return (batch["x"] @ params["w1"]).square().sum()


def contrastive_loss(params, batch):
    rows = torch.nn.functional.normalize(batch["x"] @ params["w1"], dim=-1)
    return torch.nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def token_mean_loss(params, batch):
    """Return a mean over tokens, of which the example i has `batch["weight"][i]`, as a plain number."""
    tokens = batch["weight"]
    return ((batch["x"] @ params["w1"]).square().sum(-1) * tokens).sum() / tokens.sum()


not_additive = pytest.mark.parametrize("loss", [summed_loss, contrastive_loss, token_mean_loss])


def batches_of_unequal_weights():
    """Return batches whose first two examples have different weights."""
    data = batches(3)
    for batch in data:
        batch["weight"][:2] = torch.tensor([1.0, 3.0])
    return data


@not_additive
def test_on_oom_split_warns_once_of_a_loss_that_is_no_mean_of_examples(loss):
    step, data = make_step(loss_that_fits(3, loss)), batches_of_unequal_weights()
    with pytest.warns(UserWarning, match=r"on_oom='split'\): the loss of two examples.*Return ft\.Mean") as caught:
        ft.fit(step, step.init(params()), data, on_oom="split", progress=False)
    # The warning is of the line above.
    assert [warning.filename for warning in caught] == [__file__]


@not_additive
def test_accumulate_warns_once_of_a_loss_that_is_no_mean_of_examples(loss):
    """Also in a run that is shorter than `log_every`. The check changes nothing in the run."""
    step, data = make_step(loss, ft.accumulate(2)), batches_of_unequal_weights()
    state = step.init(params())
    with pytest.warns(UserWarning, match=r"^accumulate: the loss of two examples") as caught:
        actual, _ = ft.fit(step, state, data, donate=False, log_every=10, progress=False)
    assert [warning.filename for warning in caught] == [__file__]
    for batch in data:
        state, _ = step(state, batch)
    assert_bitwise(actual, state)


@pytest.mark.parametrize("index", [3, 5])
def test_the_first_two_examples_may_be_alike(index):
    """One example in the middle of the batch, or the last, has more tokens than the others."""
    (batch,) = batches(1)
    batch["weight"] = torch.ones(6, dtype=torch.float64)
    batch["weight"][index] = 3.0
    with pytest.warns(UserWarning, match=r"^accumulate: the loss of two examples"):
        fit(make_step(token_mean_loss, ft.accumulate(2)), [batch], on_oom="raise")


def training_only_loss(params, batch):
    """A loss that cannot be called without gradients, so that it cannot be checked."""
    if not torch.is_grad_enabled():
        raise ValueError("in training only")
    return unweighted_loss(params, batch)[0]


def diffusion_loss(params, batch):
    """A loss that draws a time and noise for each example, also in evaluation, as that of a diffusion model."""
    times = torch.randint(1, 9, (len(batch["x"]), 1))
    return ((batch["x"] + times * torch.randn_like(batch["x"])) @ params["w1"]).square().mean()


@pytest.mark.parametrize("loss", [loss, loss_without_dropout, unweighted_loss, training_only_loss, diffusion_loss])
def test_a_mean_is_not_warned_of(loss):
    """Warnings are errors in the tests. Neither dropout nor a batch of one example causes one."""
    step = make_step(loss, ft.accumulate(1))
    with out_of_memory_at(0, 3):
        fit(step, batches(2))
    fit(step, batches(1, 1))
    fit(make_step(loss, ft.accumulate(2)), batches(1))
