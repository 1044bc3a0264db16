"""Gradients of a `torch.autograd.Function` that runs a part of the model again, and calls `backward` on it."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from tests.parallel.ranks import run
from tests.step.modules import LR, STEPS, make_step, mean_square, train, vectors


class RunAgain(torch.autograd.Function):
    """Keeps the input of a module alone, as reversible layers and the checkpoints of other libraries do."""

    @staticmethod
    def forward(ctx, x, part):
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.part(x)
        torch.autograd.backward(result, grad)
        return x.grad, None


class Reversible(nn.Module):
    """Runs its block again in the backward pass; with `also_directly` the loss uses its parameters twice."""

    def __init__(self, also_directly):
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.also_directly = also_directly

    def forward(self, x):
        hidden = RunAgain.apply(self.first(x), self.block)
        return self.block(hidden) if self.also_directly else hidden


def make_model(also_directly):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Reversible(also_directly).double()


def by_hand(model):
    """Return the parameters after a loop in torch."""
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for index in range(STEPS):
        optimizer.zero_grad()
        mean_square(model, vectors(index)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # both from Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("also_directly", [False, True])
@pytest.mark.parametrize(
    "wrappers",
    [
        (),
        (ft.accumulate(2), ft.donated()),
        (ft.compiled(lowering="split", backend="aot_eager"),),
        (ft.compiled(lowering="whole", backend="aot_eager"),),
    ],
    ids=lambda wrappers: " ".join(wrapper.text for wrapper in wrappers) or "plain",
)
def test_its_gradients_are_those_of_a_loop_in_torch(wrappers, also_directly):
    step = make_step(make_model(also_directly), mean_square, *wrappers)
    params = train(step, vectors).params
    torch.testing.assert_close(params, by_hand(make_model(also_directly)), rtol=1e-12, atol=1e-12)


def test_an_update_in_the_backward_pass_takes_them_if_they_come_once():
    params = train(make_step(make_model(False), mean_square, ft.update_in_backward()), vectors).params
    torch.testing.assert_close(params, by_hand(make_model(False)), rtol=1e-12, atol=1e-12)


def test_an_update_in_the_backward_pass_refuses_a_gradient_in_parts():
    step = make_step(make_model(True), mean_square, ft.update_in_backward())
    with pytest.raises(LossError, match=r"params.block.0.\w+ comes in several parts.*leave out update_in_backward"):
        train(step, vectors)


@pytest.mark.parametrize("level", [0, 2])
def test_ranks_take_them_if_they_come_once(level):
    def on_rank(also_directly):
        sharded = ft.sharded(ft.parallel.mesh(), level)
        return ft.parallel.whole(train(make_step(make_model(also_directly), mean_square, sharded), vectors).params)

    expected = by_hand(make_model(False))
    torch.testing.assert_close(run(2, lambda _: on_rank(False))[0], expected, rtol=1e-12, atol=1e-12)

    def refused(_):
        with pytest.raises(LossError, match=r"sharded: the gradient of block.0.\w+ comes in several parts"):
            on_rank(True)

    run(2, refused)


@pytest.mark.parametrize("wrapper", [ft.update_in_backward(), ft.accumulate(2), ft.clip(1e9)], ids=repr)
def test_gradients_that_the_loss_itself_computes_are_not_added_to_those_of_the_step(wrapper):
    def loss(params, batch):
        value = (params["w"] * batch).sum(1).mean()
        value.backward(retain_graph=True)
        return value

    step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), wrapper)
    state, _ = step(step.init({"w": torch.zeros(3)}), torch.ones(4, 3))
    assert state.params["w"].tolist() == [-1, -1, -1]
