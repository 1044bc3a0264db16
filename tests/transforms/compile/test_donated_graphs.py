"""A compiled step that donates its state writes the new one into the same memory, which a batch may not share."""

import pytest
import torch

import ftrain as ft
from ftrain import tree
from ftrain.errors import BatchError


def addresses_of(state):
    return [leaf.data_ptr() for leaf in tree.leaves((state.params, state.opt_state, state.slots))]


def test_fit_keeps_the_state_in_its_memory():
    """Also the part of a wrapper that has a state of its own."""
    step = ft.compose(
        ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adamw(0.1)),
        ft.clip(1.0),
        ft.ema(0.9),
        ft.compiled(backend="eager"),
    )
    state = step.init({"w": torch.ones(64)})
    addresses = addresses_of(state)
    state, _ = ft.fit(step, state, [torch.ones(64)] * 5, progress=False)
    assert addresses_of(state) == addresses


def test_a_batch_in_the_memory_of_a_donated_state_is_refused():
    step = ft.train_step(lambda params, batch: (batch @ params).square().mean(), ft.optim.sgd(0.1))
    step = ft.compiled(backend="eager", donate=True)(step)
    state = step.init(torch.ones(2))
    with pytest.raises(BatchError, match="shares memory with the state, which is donated"):
        step(state, state.params[None])
