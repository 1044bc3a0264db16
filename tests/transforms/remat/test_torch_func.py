"""Blocks and the transforms of `torch.func`: within them nothing is recomputed, and in a block there is an error."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError

SIZE = 3


class Block(nn.Module):
    def __init__(self, sloping=False):
        super().__init__()
        self.linear, self.sloping = nn.Linear(SIZE, SIZE), sloping

    def forward(self, x):
        if self.sloping:
            return torch.func.grad(lambda x: torch.tanh(self.linear(x)).sum())(x)
        return torch.tanh(self.linear(x))


def by_grad(model, batch):
    return torch.func.grad(lambda x: model(x).sum())(batch).square().mean() + model(batch).square().mean()


def by_example(model, batch):
    return torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(batch).square().mean()


def by_jvp(model, batch):
    return torch.stack(torch.func.jvp(model, (batch,), (batch,))).square().mean()


def trained(criterion, *wrappers, sloping=False):
    torch.manual_seed(0)
    model = nn.Sequential(Block(sloping), Block(sloping)).double()
    step = ft.compose(ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)), *wrappers)
    return step(step.init(), torch.randn(4, SIZE, dtype=torch.float64))[0].params


# On its first use, torch compiles its own formulas by what it has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrapper", [ft.remat(), ft.remat("dots"), ft.remat(budget=0.0)], ids=lambda each: each.text)
@pytest.mark.parametrize("criterion", [by_grad, by_example, by_jvp])
def test_within_a_transform_blocks_compute_the_same_and_the_log_says_what_they_keep(criterion, wrapper, caplog):
    actual, expected = trained(criterion, wrapper), trained(criterion)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    # A budget does not count these blocks.
    assert caplog.text.count("keeps its activations") == (wrapper.options["budget"] is None)
    close = trained(criterion, wrapper, ft.compiled(lowering="whole", backend="eager"))
    assert all(torch.allclose(close[name], expected[name], rtol=1e-12, atol=0) for name in expected)


def test_a_block_that_takes_a_gradient_by_a_transform_says_what_to_do():
    with pytest.raises(LossError, match=r"torch\.func .* use torch\.autograd\.grad"):
        trained(lambda model, batch: model(batch).square().mean(), ft.remat(), sloping=True)
