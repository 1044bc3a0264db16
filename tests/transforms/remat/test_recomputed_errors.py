"""Errors of a function that is recomputed: its tensors were written in place, or its second run does otherwise."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from tests.transforms.remat.recomputing import SIZE, catching, random_leaf, recomputing


def test_an_argument_that_was_written_in_place_is_an_error():
    x = random_leaf() * 1
    value = recomputing(catching)(x, random_leaf())
    x.add_(1)
    with pytest.raises(LossError, match="a tensor among the arguments of a block was changed in place"):
        value.sum().backward()


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_saved_tensor_that_was_written_in_place_is_an_error_as_without(is_recomputed):
    def function(x, w):
        hidden = torch.sigmoid(x @ w)
        hidden *= 2
        return hidden.sin()

    if is_recomputed:
        error, message = LossError, "a tensor that a block needs for its gradient was changed in place"
        function = recomputing(function)
    else:
        error, message = RuntimeError, "modified by an inplace operation"
    value = function(random_leaf(), random_leaf())
    with pytest.raises(error, match=message):
        value.sum().backward()


class Alternating(nn.Module):
    """Computes three sines, but something else in every second run, and returns its input if that fails."""

    def __init__(self, second, *, catches):
        super().__init__()
        self.factor, self.runs = nn.Parameter(torch.ones(())), 0
        self.second, self.catches = second, catches

    def forward(self, x):
        self.runs += 1
        if self.runs % 2:
            return x.sin().sin().sin()
        try:
            return self.second(x)
        except Exception:
            if self.catches:
                return x
            raise


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x.sin(), "1 in place of 3:"),
        (lambda x: x.sum() * 2, "0 in place of 3:"),
        (lambda x: x[:2].sin().sin().sin(), r"torch.float32 of shape \(2, 4\) on cpu in place of .* \(4, 4\) on cpu:"),
        (lambda x: x.sin().sin()[:2].sin(), r"torch.float32 of shape \(2, 4\) on cpu in place of"),
        (lambda x: x.half().sin().sin().sin(), "torch.float16 of shape .* in place of torch.float32 of shape"),
    ],
    ids=["fewer", "none", "shape", "last", "dtype"],
)
@pytest.mark.parametrize("catches", [False, True])
def test_a_second_run_that_saves_other_tensors_is_an_error(second, message, catches):
    model = Alternating(second, catches=catches)
    loss = ft.from_module(model, lambda model, batch: model(batch * model.factor).sum())
    step = ft.remat(blocks=[Alternating])(ft.train_step(loss, ft.optim.sgd(0.1)))
    with pytest.raises(
        LossError, match=f"remat: a block that was recomputed needed other .* in its first run, {message}"
    ):
        step(step.init(), torch.ones(SIZE, SIZE))
