"""`sam` beyond the matrix of laws: the formula, zero gradients, the same draws in both passes, buffers."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from tests.bits import assert_same_bits
from tests.transforms.modes import modes


def make_step(loss, *wrappers):
    return ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *wrappers)


@modes
def test_the_formula(mode):
    def quartic(params, batch):
        return (params["w"] ** 4).sum() + batch * params["b"].sin().sum()

    params = {"w": torch.randn(3, dtype=torch.float64), "b": torch.randn(2, 2, dtype=torch.float64)}
    grads = {"w": 4 * params["w"] ** 3, "b": 2.0 * params["b"].cos()}
    norm = torch.sqrt(sum(grad.square().sum() for grad in grads.values()))
    perturbed = {name: param + 0.1 * grads[name] / norm for name, param in params.items()}
    expected = {"w": params["w"] - 4 * perturbed["w"] ** 3, "b": params["b"] - 2.0 * perturbed["b"].cos()}
    step = make_step(quartic, ft.sam(0.1), *mode)
    state, metrics = step(step.init(params), torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(state.params, expected, rtol=1e-12, atol=1e-12)
    # The loss is that at the parameters themselves.
    torch.testing.assert_close(metrics["loss"], quartic(params, 2.0), rtol=1e-12, atol=1e-12)


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_zero_moves_nothing_and_brings_no_nan(mode, dtype):
    step = make_step(lambda params, batch: (params["w"] * batch).square().sum(), ft.sam(0.1), *mode)
    params = {"w": torch.ones(3, dtype=dtype)}
    state, _ = step(step.init(params), torch.zeros(3, dtype=dtype))
    assert_same_bits(state.params, params)


@modes
def test_both_passes_have_the_same_key(mode):
    draws = []

    def noisy(params, batch, rng):
        noise = ft.random.normal(rng, (3,))
        draws.append(noise)
        return (params["w"] * noise).sum()

    step = make_step(noisy, ft.sam(0.1), *mode)
    state, _ = step(step.init({"w": torch.zeros(3)}), torch.zeros(1))
    # The loss is linear, so that the gradient is the noise of the second pass.
    noise = ft.random.normal(ft.random.fold_in(ft.random.key(0), 0), (3,))
    torch.testing.assert_close(state.params["w"], -noise)
    assert len(draws) >= 2


@modes
def test_both_passes_have_the_same_dropout_of_stock_modules(mode):
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    loss_fn = ft.from_module(module, lambda model, batch: model(batch).sum())
    plain, step = make_step(loss_fn, *mode), make_step(loss_fn, ft.sam(10.0), *mode)
    batch = torch.randn(8, 64)
    # The loss is linear in the parameters, so that its gradient is the same everywhere.
    expected, _ = plain(plain.init(), batch)
    state, _ = step(step.init(), batch)
    torch.testing.assert_close(state.params, expected.params)


def test_after_a_step_torch_draws_the_numbers_that_it_draws_after_one_pass():
    def loss(params, batch):
        return (params["w"] * torch.rand(3)).sum()

    draws = []
    for wrappers in ((), (ft.sam(),)):
        step = make_step(loss, *wrappers)
        torch.manual_seed(0)
        step(step.init({"w": torch.ones(3)}), torch.ones(1))
        draws.append(torch.rand(2))
    assert torch.equal(*draws)


@modes
def test_buffers_are_those_of_the_first_pass(mode):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    loss_fn = ft.from_module(module, lambda model, batch: model(batch).square().mul(torch.arange(4.0)).sum())
    plain, step = make_step(loss_fn, *mode), make_step(loss_fn, ft.sam(1.0), *mode)
    batch = torch.randn(8, 4)
    expected, _ = plain(plain.init(), batch)
    state, _ = step(step.init(), batch)
    torch.testing.assert_close(state.buffers, expected.buffers)
    assert int(state.buffers["1.num_batches_tracked"]) == 1
    assert not state.params["0.weight"].allclose(expected.params["0.weight"])


@modes
def test_the_second_pass_starts_with_the_buffers_of_before_the_step(mode):
    """The loss is linear with a slope in a buffer, which each pass increases."""

    def sloped(params, batch, buffers):
        return (params["w"] * batch * buffers["slope"]).sum(), {}, {"slope": buffers["slope"] + 1}

    step = make_step(sloped, ft.sam(0.1), *mode)
    state, _ = step(step.init({"w": torch.zeros(3)}, buffers={"slope": torch.tensor(2.0)}), torch.ones(3))
    torch.testing.assert_close(state.params["w"], torch.full((3,), -2.0))
    assert float(state.buffers["slope"]) == 3


def test_it_prints():
    step = make_step(lambda params, batch: params["w"].sum(), ft.sam(), ft.clip(1.0))
    assert "grad    value_and_grad <- sam(0.05) <- clip(norm<=1)" in repr(step)


def test_a_step_that_never_has_all_gradients_is_refused():
    with pytest.raises(ComposeError, match=r"update_in_backward: sam\(0.05\) needs all gradients at once"):
        make_step(lambda params, batch: params["w"].sum(), ft.sam(), ft.update_in_backward())


@pytest.mark.parametrize("rho", [0, -1.0, float("inf"), float("nan"), True, "0.05"])
def test_a_distance_out_of_range_is_refused(rho):
    with pytest.raises(OptionError, match=r"sam: rho is .* needs a positive number"):
        ft.sam(rho)


@modes
def test_a_step_is_skipped_if_the_second_gradient_alone_is_not_finite(mode):
    def loss(params, batch):
        return -(params["w"] * batch).sqrt().sum()

    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sam(0.1), ft.skip_nonfinite(), *mode)
    # The gradient moves 0.04 to -0.06, which has no square root.
    for start, skipped in ((0.04, True), (1.0, False)):
        params = {"w": torch.tensor(start)}
        state, metrics = step(step.init(params), torch.tensor(1.0))
        assert bool(metrics["skipped"]) is skipped
        assert torch.equal(state.params["w"], params["w"]) is skipped
