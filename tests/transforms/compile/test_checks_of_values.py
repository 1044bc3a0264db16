"""Checks of values that a library makes within a loss are part of the captured graph, and run in each step."""

import pytest
import torch

import ftrain as ft
from tests.transforms.modes import CAPTURED


def test_a_distribution_checks_its_arguments_in_the_graph():
    def entropy(params, batch):
        return torch.distributions.Categorical(logits=params * batch, validate_args=True).entropy().mean()

    step = ft.compose(ft.train_step(entropy, ft.optim.sgd(0.1)), CAPTURED)
    state, batch = step.init(torch.ones(3)), torch.ones(2, 3)
    assert int(step(state, batch)[0].step) == 1
    with pytest.raises(RuntimeError, match="a check of values within the loss failed"):
        step(state, batch * torch.nan)
