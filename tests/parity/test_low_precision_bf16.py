"""Optimizers with moments in bfloat16 equal formulas written out, or the same optimizer with wider moments."""

import pytest
import torch

from ftrain import optim, random, tree
from ftrain.optim.formats import Floats, window
from ftrain.optim.rounding import noise
from tests.parity.low_precision import BF16, F32, F64, PATHS, adamw_reference, assert_rounded, make_params, randn, run


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("stochastic", [False, True])
def test_bfloat16_moments_equal_the_formula(path, dtype, stochastic, pretend):
    """Each step starts from our own state, so that a difference of one rounding does not grow."""
    pretend(path)
    optimizer = optim.adamw(0.01, weight_decay=0.1, state_dtype="bf16", stochastic_rounding=stochastic)
    params = {"w": randn((50, 60), 0, dtype)}
    state = optimizer.init(params)
    for step in range(4):
        key, grad = random.fold_in(random.key(0), step), randn((50, 60), 1 + step, dtype)

        def store(name, value, key=key):
            if name == "p" and dtype == F32:
                return value.float()
            if not stochastic:
                return value.float().to(BF16)
            offset = {"p": 0, "mu": 3000, "nu": 6000}[name]
            bits = noise(key, offset, 3000, eager=False).view(50, 60)
            return ((value.float().view(torch.int32) + bits) >> 16).to(torch.int16).view(BF16)

        p, m, v = adamw_reference(
            params["w"], grad, state["mu"]["w"], state["nu"]["w"], step + 1, store=store, decay=0.1
        )
        rate = torch.tensor(0.01, dtype=F64) if path == "graph" else 0.01
        params, state = optimizer.update({"w": grad}, state, params, {"lr": rate, "rng": key}, donate=path == "donated")
        assert_rounded(state["mu"]["w"], m)
        assert_rounded(state["nu"]["w"], v)
        if dtype == BF16:
            assert_rounded(params["w"], p)
        else:
            torch.testing.assert_close(params["w"], p, rtol=1e-6, atol=1e-7)


def test_float32_moments_of_bfloat16_parameters_are_those_of_float32():
    params = {"w": randn((40, 50), 0, BF16)}
    optimizer = optim.adamw(0.01, state_dtype="fp32")
    new_params, state = run(optimizer, params, steps=1)
    plain, start, grads = optim.adamw(0.01), tree.cast(params, F32), {"w": randn((40, 50), 0, BF16).float()}
    expected_params, expected = plain.update(grads, plain.init(start), start, {"lr": 0.01})
    torch.testing.assert_close((state["mu"], state["nu"]), (expected["mu"], expected["nu"]), rtol=1e-6, atol=0)
    assert torch.equal(new_params["w"], expected_params["w"].to(BF16))


def test_float32_moments_of_float32_parameters_are_plain_adamw():
    params = make_params()
    for path in PATHS[:2]:
        actual = run(optim.adamw(0.01, weight_decay=0.1, state_dtype="fp32"), params, path)
        expected = run(optim.adamw(0.01, weight_decay=0.1), params, path)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [optim.adam, optim.adamw])
def test_amsgrad_with_bfloat16_moments_is_close_to_float32(make):
    options = {"amsgrad": True, "maximize": True, "weight_decay": 0.1}
    params = {"w": randn((40, 50), 0)}
    actual, state = run(make(0.01, state_dtype="bf16", **options), params)
    expected, _ = run(make(0.01, **options), params)
    assert {leaf.dtype for key in ("mu", "nu", "nu_max") for leaf in state[key].values()} == {BF16}
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=5e-4)


MOMENTUM_OPTIMIZERS = [
    (optim.lion, {}),
    (optim.sgd, {"momentum": 0.9, "nesterov": True}),
    (optim.sgd, {"momentum": 0.9, "dampening": 0.5}),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("make", "options"), MOMENTUM_OPTIMIZERS)
def test_lion_and_sgd_with_bfloat16_moments(make, options, path, pretend):
    """The next step from a state in bfloat16 is that of the plain optimizer from the same state in float32."""
    pretend(path)
    plain = make(0.01, weight_decay=0.1, **options)
    low = make(0.01, weight_decay=0.1, **options, state_dtype="bf16")
    params, state = run(low, make_params())
    (key,) = [key for key in state if key != "count"]
    assert {leaf.dtype for leaf in state[key].values()} == {BF16}
    float32_state = {**tree.clone(state), key: tree.cast(state[key], F32)}
    grads = {name: randn(leaf.shape, 50 + i) for i, (name, leaf) in enumerate(params.items())}
    expected_params, expected_state = plain.update(grads, float32_state, params, {"lr": 0.01})
    rate = torch.tensor(0.01, dtype=F64) if path == "graph" else 0.01
    hyper = {"lr": rate, "rng": random.key(9)}
    actual, state = low.update(grads, state, params, hyper, donate=path == "donated")
    torch.testing.assert_close(actual, expected_params, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(tree.cast(state[key], F32), expected_state[key], rtol=2**-7, atol=1e-30)


def test_a_window_of_a_format_writes_into_the_stored_tensor():
    block_format, stored = Floats(BF16), (torch.zeros(10, dtype=BF16),)
    block_format.write([window(stored, block_format.block, 2, 5)], torch.ones(3), None)
    assert stored[0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
