"""`sam` beyond the matrix of laws: the formula, zero gradients, the same draws, buffers, tied weights."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from tests.laws.pipelines import assert_equal

CAPTURED = ft.compiled(lowering="whole", backend="eager")
modes = pytest.mark.parametrize("more", [(), (ft.donated(),), (CAPTURED,)], ids=["eager", "donated", "captured"])


def step_of(loss, *wrappers, rho=0.1, **options):
    return ft.compose(ft.train_step(loss, ft.optim.sgd(1.0), **options), ft.sam(rho), *wrappers)


@modes
def test_the_formula(more):
    def quartic(params, batch):
        return (params["w"] ** 4).sum() + batch * params["b"].sin().sum()

    params = {"w": torch.randn(3, dtype=torch.float64), "b": torch.randn(2, 2, dtype=torch.float64)}
    grads = {"w": 4 * params["w"] ** 3, "b": 2.0 * params["b"].cos()}
    norm = torch.sqrt(sum(grad.square().sum() for grad in grads.values()))
    moved = {name: leaf + 0.1 * grads[name] / norm for name, leaf in params.items()}
    expected = {"w": params["w"] - 4 * moved["w"] ** 3, "b": params["b"] - 2.0 * moved["b"].cos()}
    step = step_of(quartic, *more)
    state, metrics = step(step.init(params), torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(state.params, expected, rtol=1e-12, atol=1e-12)
    # The loss is that at the parameters themselves.
    torch.testing.assert_close(metrics["loss"], quartic(params, 2.0), rtol=1e-12, atol=1e-12)


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_zero_moves_nothing_and_brings_no_nan(more, dtype):
    step = step_of(lambda params, batch: (params["w"] * batch).square().sum(), *more)
    params = {"w": torch.ones(3, dtype=dtype)}
    state, _ = step(step.init(params), torch.zeros(3, dtype=dtype))
    assert_equal(state.params, params)


@modes
def test_both_passes_have_the_same_key(more):
    seen = []

    def noisy(params, batch, rng):
        noise = ft.random.normal(rng, (3,))
        seen.append(noise)
        return (params["w"] * noise).sum()

    step = step_of(noisy, *more)
    state, _ = step(step.init({"w": torch.zeros(3)}), torch.zeros(1))
    # The loss is linear, so that the gradient is the noise: of both passes, if it is the same.
    noise = ft.random.normal(ft.random.fold_in(ft.random.key(0), 0), (3,))
    torch.testing.assert_close(state.params["w"], -noise)
    assert len(seen) >= 2


@modes
def test_both_passes_have_the_same_dropout_of_stock_modules(more):
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    loss = ft.from_module(module, lambda model, batch: model(batch).sum())
    plain = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *more)
    # Of a loss that is linear in the parameters, the gradient is the same everywhere.
    step = step_of(loss, *more, rho=10.0)
    batch = torch.randn(8, 64)
    actual, expected = (each(each.init(), batch)[0].params for each in (step, plain))
    torch.testing.assert_close(actual, expected)


def test_torch_draws_on_as_after_one_pass():
    def loss(params, batch):
        return (params["w"] * torch.rand(3)).sum()

    drawn = []
    for wrappers in ((), (ft.sam(),)):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *wrappers)
        torch.manual_seed(0)
        step(step.init({"w": torch.ones(3)}), torch.ones(1))
        drawn.append(torch.rand(2))
    assert torch.equal(*drawn)


@modes
def test_buffers_are_those_of_the_first_pass(more):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    loss = ft.from_module(module, lambda model, batch: model(batch).square().mul(torch.arange(4.0)).sum())
    plain = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *more)
    step = step_of(loss, *more, rho=1.0)
    batch = torch.randn(8, 4)
    actual, expected = (each(each.init(), batch)[0] for each in (step, plain))
    torch.testing.assert_close(actual.buffers, expected.buffers)
    assert int(actual.buffers["1.num_batches_tracked"]) == 1
    assert not actual.params["0.weight"].allclose(expected.params["0.weight"])


@modes
def test_the_second_pass_starts_with_the_buffers_of_before_the_step(more):
    """The loss is linear with a slope that the buffer gives, which each pass makes larger."""

    def sloped(params, batch, buffers):
        return (params["w"] * batch * buffers["slope"]).sum(), {}, {"slope": buffers["slope"] + 1}

    step = step_of(sloped, *more)
    state, _ = step(step.init({"w": torch.zeros(3)}, buffers={"slope": torch.tensor(2.0)}), torch.ones(3))
    torch.testing.assert_close(state.params["w"], torch.full((3,), -2.0))
    assert float(state.buffers["slope"]) == 3


def test_it_prints():
    step = ft.compose(ft.train_step(lambda p, b: p["w"].sum(), ft.optim.sgd(1.0)), ft.sam(), ft.clip(1.0))
    assert "grad    value_and_grad <- sam(0.05) <- clip(norm<=1)" in repr(step)


def test_what_needs_all_gradients_is_refused():
    with pytest.raises(ComposeError, match=r"update_in_backward: sam\(0.05\) needs all gradients at once"):
        ft.compose(ft.train_step(lambda p, b: p["w"].sum(), ft.optim.sgd(1.0)), ft.sam(), ft.update_in_backward())


@pytest.mark.parametrize("rho", [0, -1.0, float("inf"), float("nan"), True, "0.05"])
def test_a_distance_out_of_range(rho):
    with pytest.raises(OptionError, match=r"sam: rho is .* needs a positive number"):
        ft.sam(rho)
