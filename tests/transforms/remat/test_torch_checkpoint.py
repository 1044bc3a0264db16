"""Blocks of `remat` within and around functions that `torch.utils.checkpoint` recomputes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from ftrain.errors import TraceError
from tests.bits import assert_same_bits
from tests.transforms.modes import CAPTURED
from tests.transforms.remat.recomputing import SIZE


class Layers(nn.Module):
    """Linear maps with dropout; torch recomputes each of them, all of them together, or both."""

    def __init__(self, *, recomputes_each, recomputes_all):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.recomputes_each, self.recomputes_all = recomputes_each, recomputes_all

    def forward(self, x):
        def apply_layer(x, layer):
            return F.dropout(torch.tanh(layer(F.dropout(x, 0.5))), 0.5)

        def apply_all(x):
            for layer in self.layers:
                if self.recomputes_each:
                    x = checkpoint(apply_layer, x, layer, use_reentrant=False)
                else:
                    x = apply_layer(x, layer)
            return x

        return checkpoint(apply_all, x, use_reentrant=False) if self.recomputes_all else apply_all(x)


def params_after_a_step(*wrappers, recomputes_each=False, recomputes_all=False):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(Layers(recomputes_each=recomputes_each, recomputes_all=recomputes_all) for _ in range(2))
    ).double()
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    state, _ = step(step.init(seed=1), torch.ones(3, SIZE, dtype=torch.float64))
    return state.params


@pytest.mark.parametrize("recomputes_all", [False, True])
@pytest.mark.parametrize("recomputes_each", [False, True])
@pytest.mark.parametrize("blocks", [[Layers], [nn.Linear], [Layers, nn.Linear]], ids=["outer", "inner", "both"])
def test_blocks_within_and_around_torchs_checkpoint_draw_the_same_bits(blocks, recomputes_each, recomputes_all):
    actual = params_after_a_step(
        ft.remat(blocks=blocks), recomputes_each=recomputes_each, recomputes_all=recomputes_all
    )
    assert_same_bits(actual, params_after_a_step())


@pytest.mark.parametrize(
    "blocks", [pytest.param([Layers], id="outer"), pytest.param([nn.Linear], id="inner", marks=pytest.mark.exhaustive)]
)
def test_draws_that_torch_would_repeat_with_other_numbers_in_a_whole_graph_are_refused(blocks):
    with pytest.raises(TraceError, match=r"recomputed by torch\.utils\.checkpoint"):
        params_after_a_step(ft.remat(blocks=blocks), CAPTURED, recomputes_each=True, recomputes_all=True)


class LinearWithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return F.dropout(torch.tanh(self.linear(x)), 0.5)


def test_draws_of_blocks_within_torchs_checkpoint_are_refused_in_a_whole_graph():
    model = nn.Sequential(LinearWithDropout(), LinearWithDropout()).double()
    loss = ft.from_module(model, lambda model, batch: checkpoint(model, batch, use_reentrant=False).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.remat(blocks=[LinearWithDropout]), CAPTURED)
    with pytest.raises(TraceError, match=r"recomputed by torch\.utils\.checkpoint"):
        step(step.init(), torch.ones(3, SIZE, dtype=torch.float64))
