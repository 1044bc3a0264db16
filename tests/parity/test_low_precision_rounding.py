"""Updates in 16 bits round what they store and not their constants; stochastic rounding is unbiased."""

import itertools
import math

import pytest
import torch

import ftrain as ft
from ftrain import optim, random, tree
from ftrain.optim.rounding import noise, rounded
from ftrain.transforms.compile.capture import capture
from tests.parity.low_precision import BF16, F32, F64, assert_bitwise, randn, run

# Constants of updates in 16 bits


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (lambda: optim.sgd(0.01, momentum=0.99), lambda leaves: torch.optim.SGD(leaves, 0.01, momentum=0.99)),
        (lambda: optim.rmsprop(0.01, eps=1e-3), lambda leaves: torch.optim.RMSprop(leaves, 0.01, eps=1e-3)),
    ],
)
def test_decay_rates_are_not_rounded_to_16_bits(ours, torchs, dtype):
    """In bfloat16 0.99 would be 0.988, and momentum would add up 85 gradients in place of 100."""
    start = {"matrix": randn((40, 50), 0, dtype), "scalar": randn((), 1, dtype)}
    params, _ = run(ours(), start, steps=10)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    theirs = torchs(list(leaves.values()))
    for step in range(10):
        for i, leaf in enumerate(leaves.values()):
            leaf.grad = randn(leaf.shape, 100 * step + i, dtype)
        theirs.step()
    assert_bitwise(params, {name: leaf.detach() for name, leaf in leaves.items()})


@pytest.mark.parametrize("make", [optim.adamw, optim.lion, optim.muon])
def test_weight_decay_is_not_rounded_to_16_bits_in_a_graph(make):
    """1 - 0.002 would be 0.996 in bfloat16."""
    params, zeros, actual = {"w": randn((40, 50), 0, BF16)}, {"w": torch.zeros(40, 50, dtype=BF16)}, []
    optimizer = make(0.02, weight_decay=0.1)
    for rate in (0.02, torch.tensor(0.02, dtype=F64)):
        actual.append(optimizer.update(zeros, optimizer.init(params), params, {"lr": rate}))
    assert_bitwise(actual[1], actual[0])


def test_clipping_scales_16_bits_by_the_factor_itself():
    start, grads = {"w": torch.zeros(1000, dtype=BF16)}, randn((1000,), 0, BF16)
    step = ft.compose(ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optim.sgd(1.0)), ft.clip(1.0))
    state, metrics = step(step.init(start), grads)
    assert_bitwise(state.params["w"], -(grads.to(F64) / (metrics["grad_norm"] + 1e-6)).to(BF16))


# Rounding at random


@pytest.mark.parametrize("offset", [0, 1, 7, (1 << 32) - 3, 3 << 33])
def test_noise_is_the_same_however_it_is_drawn(offset):
    key, size = random.fold_in(random.key(3), 1), 1001
    drawn = noise(key, offset, size, eager=True)
    assert drawn.dtype == torch.int32
    assert drawn.shape == (size,)
    assert torch.equal(drawn, noise(key, offset, size, eager=False))
    captured = capture(lambda key: [noise(key, offset, size, eager=False)], [key], lambda: None)
    assert torch.equal(drawn, captured(key)[0])
    # The noise of an element depends on its offset alone, not on where the drawn range starts.
    assert torch.equal(drawn[100:], noise(key, offset + 100, size - 100, eager=True))


def test_noise_is_uniform_and_independent():
    size = 1 << 16
    keys = random.split(random.key(0), 4)
    drawn = torch.stack([noise(key, 0, size, eager=True) for key in keys])
    assert (int(drawn.min()), int(drawn.max())) == (0, 65535)
    cells = torch.stack([row.bincount(minlength=1 << 16).view(256, 256).sum(1) for row in drawn]).double()
    chi_squared = ((cells - size / 256).square() / (size / 256)).sum(1)
    assert (chi_squared - 255).abs().max() < 4 * math.sqrt(2 * 255)
    signs = ((drawn.unsqueeze(-1) >> torch.arange(16)) & 1).double() - 0.5
    # Each bit is fair, and uncorrelated with other bits of the word, of the next elements and of other keys.
    assert signs.mean(1).abs().max() < 4.5 * 0.5 / math.sqrt(size)
    for shift in (1, 2, 3, 64, 256):
        for partner in (signs, signs.flip(-1), signs.roll(1, 0)):
            assert (signs[:, shift:] * partner[:, :-shift]).mean(1).abs().max() < 4.5 * 0.25 / math.sqrt(size - shift)
    assert (signs * signs.roll(1, 0)).mean(1).abs().max() < 4.5 * 0.25 / math.sqrt(size)


def test_stochastic_rounding_goes_to_a_neighbour_and_is_unbiased():
    value = torch.tensor([1.0 + 2**-9, -3.3, 1e-30, 1e-42, 1.0, 0.0, -0.0, 3.38e38])
    below = (value.view(torch.int32) & -0x10000).view(F32)
    above = ((value.view(torch.int32) & -0x10000) + 0x10000).view(F32)
    draws = 20_000
    bits = noise(random.key(1), 0, draws * len(value), eager=True)
    actual = rounded(value.repeat(draws), bits).view(draws, -1)
    assert torch.equal(actual.to(BF16).to(F32), actual)
    exact = value == value.to(BF16).to(F32)
    assert torch.where(exact, actual == value, (actual == below) | (actual == above)).all()
    share = (actual == above).double().mean(0)
    expected_share = torch.where(exact, 0.0, (value.double() - below.double()) / (above.double() - below.double()))
    assert ((share - expected_share).abs() <= 4.5 * (expected_share * (1 - expected_share) / draws).sqrt()).all()


def test_rounding_keeps_nan_and_infinity():
    patterns = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x400000, 0x7F800000, -0x800000]
    value = torch.tensor(patterns, dtype=torch.int32).view(F32)
    for bits in (0, 1, 65535):
        actual = rounded(value.clone(), torch.full((7,), bits, dtype=torch.int32)).to(BF16)
        assert actual[:5].isnan().all()
        assert actual[5:].tolist() == [math.inf, -math.inf]


def test_noise_differs_between_steps_leaves_and_trees():
    """Equal parameters with equal gradients are rounded in different directions."""
    params = {"a": torch.ones(4096, dtype=BF16), "b": torch.ones(4096, dtype=BF16)}
    optimizer = optim.adamw(1.0, stochastic_rounding=True)
    params_down, mu_up, nu_up = [], [], []
    for step in range(3):
        # The update is 2^-9 in float32, half of the distance from 1 to the next bfloat16 below.
        hyper = {"lr": 2.0**-9, "rng": random.fold_in(random.key(0), step)}
        new_params, state = optimizer.update(tree.map(torch.ones_like, params), optimizer.init(params), params, hyper)
        params_down += [new_params["a"] < 1, new_params["b"] < 1]
        mu_up.append(state["mu"]["a"].float() > 0.1)
        nu_up.append(state["nu"]["b"].float() > 0.001)
    for first, second in itertools.combinations(params_down, 2):
        assert 0.4 < float((first == second).double().mean()) < 0.6
    for moment_up in (mu_up, nu_up):
        for first, second in itertools.combinations(moment_up, 2):
            assert not torch.equal(first, second)


def test_stochastic_rounding_keeps_updates_smaller_than_half_a_unit():
    """A hundred updates, each a thirtieth of the distance between two values of bfloat16."""
    params = {"w": torch.full((10_000,), 1.0, dtype=BF16)}
    total_update = {}
    for stochastic in (False, True):
        optimizer = optim.adamw(1.0, state_dtype="fp32", stochastic_rounding=stochastic)
        new_params, state = params, optimizer.init(params)
        for step in range(100):
            hyper = {"lr": 2.0**-8 / 30, "rng": random.fold_in(random.key(0), step)}
            new_params, state = optimizer.update({"w": torch.ones_like(params["w"])}, state, new_params, hyper)
        total_update[stochastic] = 1.0 - float(new_params["w"].double().mean())
    assert total_update[False] == 0.0
    assert total_update[True] == pytest.approx(100 * 2.0**-8 / 30, rel=0.02)


def test_stochastic_rounding_lets_the_second_moment_decay():
    """It decays by 0.1% a step; values of bfloat16 are 0.4 to 0.8% apart, so rounding to nearest keeps it constant."""
    remaining = {}
    for stochastic, steps in ((False, 2), (True, 300)):
        optimizer = optim.adamw(0.0, state_dtype="bf16", stochastic_rounding=stochastic)
        params = {"w": torch.zeros(2048)}
        state = optimizer.init(params)
        state["nu"]["w"].fill_(1.0)
        for step in range(steps):
            hyper = {"lr": 0.0, "rng": random.fold_in(random.key(0), step)}
            params, state = optimizer.update(tree.map(torch.zeros_like, params), state, params, hyper, donate=True)
        remaining[stochastic] = float(state["nu"]["w"].double().mean())
    assert remaining[False] == 1.0
    assert remaining[True] == pytest.approx(0.999**300, rel=0.01)
