"""Losses that run a backward pass themselves, or in the backward pass of a Function."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from tests.parallel import models
from tests.parallel.ranks import run


def attacked(model, batch, *, clears=False, by_grad=False):
    """Return the loss at inputs moved along the sign of their gradient (Goodfellow et al. 2014, arXiv:1412.6572)."""
    x = batch["x"].detach().requires_grad_()
    loss = (model(x) - batch["y"]).square().mean()
    if by_grad:
        (gradient,) = torch.autograd.grad(loss, x)
    else:
        loss.backward()
        gradient = x.grad
    if clears:
        model.zero_grad()
    return (model(batch["x"] + 0.1 * gradient.sign()) - batch["y"]).square().mean()


def trained(criterion, *wrappers):
    """Return the parameters after training a small module with a criterion."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    step = ft.compose(ft.train_step(ft.from_module(module, criterion), ft.optim.adamw(1e-2)), *wrappers)
    state = step.init(seed=0)
    for batch in models.batches():
        state, _ = step(state, batch)
    return state.params


WRAPPERS = {
    "plain": [],
    "accumulate": [ft.accumulate(2)],
    "clip within accumulate": [ft.clip(1e9), ft.accumulate(3)],
    "update_in_backward": [ft.update_in_backward()],
    "sam": [ft.sam(1e-30)],
}


@pytest.mark.parametrize("clears", [False, True], ids=["", "zero_grad"])
@pytest.mark.parametrize("wrappers", WRAPPERS)
def test_a_backward_pass_of_the_loss_itself_adds_nothing_to_the_gradient(clears, wrappers):
    expected = trained(lambda model, batch: attacked(model, batch, by_grad=True))
    actual = trained(lambda model, batch: attacked(model, batch, clears=clears), *WRAPPERS[wrappers])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", [0, 2, 3])
def test_on_ranks_a_backward_pass_in_the_loss_is_an_error_and_the_gradient_of_inputs_is_not(level):
    def rank(criterion):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), level), criterion=criterion)
        return models.train(step)[0].params

    def by_grad(model, batch):
        return attacked(model, batch, by_grad=True)

    (expected,) = run(1, lambda _: rank(by_grad))
    torch.testing.assert_close(run(2, lambda _: rank(by_grad))[0], expected, rtol=1e-12, atol=1e-12)

    def refused(_):
        with pytest.raises(LossError, match=r"runs a backward pass through its parameters.*torch\.autograd\.grad"):
            rank(attacked)

    run(2, refused)


class Adjoint(torch.autograd.Function):
    """Like the adjoint method of differential equations: its backward computes gradients of the parameters itself."""

    @staticmethod
    def forward(ctx, function, x, *params):
        ctx.function = function
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            total = [torch.zeros_like(tensor) for tensor in (leaf, *params)]
            for share in (0.25, 0.75):  # In two parts, whose sum is the gradient.
                grads = torch.autograd.grad(ctx.function(leaf), (leaf, *params), share * gradient)
                total = [a + b for a, b in zip(total, grads, strict=True)]
        return None, *total


def by_adjoint(model, batch):
    return (model[2](Adjoint.apply(model[:2], batch["x"], *model[0].parameters())) - batch["y"]).square().mean()


@pytest.mark.parametrize("wrappers", [[], [ft.compiled(backend="eager")]], ids=["eager", "compiled"])
def test_an_update_in_backward_waits_for_the_whole_gradient_of_a_function_that_takes_parts_of_it(wrappers):
    expected = trained(lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean())
    torch.testing.assert_close(
        trained(by_adjoint, ft.update_in_backward(), *wrappers), expected, rtol=1e-12, atol=1e-12
    )


class Product(torch.autograd.Function):
    """The dot product of two tensors; the gradient of one tensor is the other one."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx, cotangent):
        a, b = ctx.saved_tensors
        return (b, a) if cotangent == 1 else (b * cotangent, a * cotangent)


OPTIMIZERS = {
    "sgd": ft.optim.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "adamw": ft.optim.adamw(0.1),
    "adafactor": ft.optim.adafactor(0.1),
    "partition": ft.optim.partition({"a": ft.optim.sgd(0.1), "b": ft.optim.lion(0.1)}, {"a": ["a"]}),
}
STACKS = {
    "plain": [],
    "ema": [ft.ema(0.9)],
    "accumulate": [ft.accumulate(1)],
    "skip_nonfinite": [ft.skip_nonfinite()],
    "update_in_backward": [ft.update_in_backward()],
}


@pytest.mark.parametrize("wrappers", STACKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_that_is_a_parameter_is_read_before_a_donated_update_overwrites_it(optimizer, wrappers):
    def trained_by(product, *more):
        step = ft.train_step(lambda params, batch: product(params["a"], params["b"]), OPTIMIZERS[optimizer])
        step = ft.compose(step, *STACKS[wrappers], *more)
        state = step.init({"a": torch.arange(1.0, 4), "b": torch.ones(3)})
        for _ in range(3):
            state, _ = step(state, {"x": torch.ones(2)})
        return state.params

    expected = trained_by(lambda a, b: (a * b).sum())
    torch.testing.assert_close(trained_by(Product.apply), expected)
    torch.testing.assert_close(trained_by(Product.apply, ft.donated()), expected)
