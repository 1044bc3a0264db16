"""Blocks and the transforms of `torch.func`: within them nothing is recomputed, and in a block there is an error."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from tests.bits import assert_same_bits
from tests.transforms.modes import CAPTURED
from tests.transforms.remat.recomputing import SIZE


class Block(nn.Module):
    """Returns a linear map with tanh, or the gradient of its sum by `torch.func.grad`."""

    def __init__(self, *, takes_gradient=False):
        super().__init__()
        self.linear, self.takes_gradient = nn.Linear(SIZE, SIZE), takes_gradient

    def forward(self, x):
        if self.takes_gradient:
            return torch.func.grad(lambda x: torch.tanh(self.linear(x)).sum())(x)
        return torch.tanh(self.linear(x))


def by_grad(model, batch):
    return torch.func.grad(lambda x: model(x).sum())(batch).square().mean() + model(batch).square().mean()


def by_example(model, batch):
    return torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(batch).square().mean()


def by_jvp(model, batch):
    return torch.stack(torch.func.jvp(model, (batch,), (batch,))).square().mean()


def params_after_a_step(criterion, *wrappers, takes_gradient=False):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(takes_gradient=takes_gradient) for _ in range(2))).double()
    step = ft.compose(ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)), *wrappers)
    return step(step.init(), torch.randn(5, SIZE, dtype=torch.float64))[0].params


# At the first use of forward mode, torch compiles its own formulas with a deprecated function.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("remat", [ft.remat(), ft.remat("dots"), ft.remat(budget=0.0)], ids=lambda remat: remat.text)
@pytest.mark.parametrize("criterion", [by_grad, by_example, by_jvp])
def test_blocks_within_a_transform_compute_the_same_and_the_log_says_that_they_are_kept(criterion, remat, caplog):
    expected = params_after_a_step(criterion)
    assert_same_bits(params_after_a_step(criterion, remat), expected)
    # A budget does not count these blocks.
    assert caplog.text.count("keeps its activations") == (remat.options["budget"] is None)
    captured = params_after_a_step(criterion, remat, CAPTURED)
    torch.testing.assert_close(captured, expected, rtol=1e-12, atol=0)


def test_a_block_that_takes_a_gradient_by_a_transform_is_an_error_with_advice():
    with pytest.raises(LossError, match=r"torch\.func .* use torch\.autograd\.grad"):
        params_after_a_step(lambda model, batch: model(batch).square().mean(), ft.remat(), takes_gradient=True)
