"""Optimizers with moments or parameters in 16 or 8 bits equal formulas written out and torchao, and keep their laws."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain import checkpoint, optim, random, tree
from ftrain.errors import OptionError, StructureError
from ftrain.optim.formats import Codes, Floats, dynamic_map, window
from ftrain.optim.grouping import BLOCK
from ftrain.optim.rounding import noise, rounded
from ftrain.transforms.compile.capture import capture

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
PATHS = ["eager", "donated", "unfused", "unread", "graph"]


def randn(shape, seed, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(optimizer, params, path="eager", steps=4, size=1.0, seed=0):
    """Make `steps` updates with gradients and keys that depend on the step alone; return parameters and state."""
    params, state = tree.clone(params), optimizer.init(params)
    for step in range(steps):
        grads = {
            name: size * randn(leaf.shape, 100 * step + i, leaf.dtype) for i, (name, leaf) in enumerate(params.items())
        }
        rate = torch.tensor(0.01, dtype=F64) if path == "graph" else 0.01
        hyper = {"lr": rate, "rng": random.fold_in(random.key(seed), step)}
        params, state = optimizer.update(grads, state, params, hyper, donate=path == "donated")
    return params, state


def make_params(dtype=F32):
    shapes = {"long": (BLOCK + 5,), "matrix": (70, 90), "odd": (61, 71), "vector": (130,), "one": (1,), "empty": (0, 3)}
    return {name: randn(shape, index, dtype) for index, (name, shape) in enumerate(shapes.items())}


def assert_same(actual, expected):
    for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


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
    assert_same(params, {name: leaf.detach() for name, leaf in leaves.items()})


@pytest.mark.parametrize("make", [optim.adamw, optim.lion, optim.muon])
def test_weight_decay_is_not_rounded_to_16_bits_in_a_graph(make):
    """1 - 0.002 would be 0.996 in bfloat16."""
    params, zeros, actual = {"w": randn((40, 50), 0, BF16)}, {"w": torch.zeros(40, 50, dtype=BF16)}, []
    optimizer = make(0.02, weight_decay=0.1)
    for rate in (0.02, torch.tensor(0.02, dtype=F64)):
        actual.append(optimizer.update(zeros, optimizer.init(params), params, {"lr": rate}))
    assert_same(actual[1], actual[0])


def test_clipping_scales_16_bits_by_the_factor_itself():
    start, grads = {"w": torch.zeros(1000, dtype=BF16)}, randn((1000,), 0, BF16)
    step = ft.compose(ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optim.sgd(1.0)), ft.clip(1.0))
    state, metrics = step(step.init(start), grads)
    assert_same(state.params["w"], -(grads.to(F64) / (metrics["grad_norm"] + 1e-6)).to(BF16))


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


# Formulas written out


def adamw_reference(p, g, m, v, t, *, store, decay=0.0):
    """Return parameter and moments after step `t` of AdamW (Loshchilov and Hutter 2019), computed in float64.

    `store(name, value)` rounds each of them to the dtype in which it is stored.
    """
    p, g, m, v = (x.double() for x in (p, g, m, v))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    p = p - 0.01 * decay * p - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return store("p", p), store("mu", m), store("nu", v)


def assert_rounded(actual, expected, share=0.01):
    """Assert that bfloat16 values or codes are equal, but for a share that was rounded in the other direction."""
    assert actual.dtype == expected.dtype
    assert int((actual != expected).sum()) <= share * actual.numel()
    if actual.dtype == BF16:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-7)


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


# Blocks of 8 bits


def test_the_256_values_of_the_dynamic_map():
    for signed in (True, False):
        values = dynamic_map(signed=signed)
        assert values.shape == (256,)
        assert (values.diff() > 0).all()
        assert values[-1] == 1.0
        assert 0.0 in values
        assert float(values[0]) == pytest.approx(-0.99296875 if signed else 0.0)
    # Seven decades, each with twice as many values as the next smaller one.
    counts = [int(((values >= 10.0**-k) & (values < 10.0 ** (1 - k))).sum()) for k in range(1, 8)]
    assert counts == [128, 64, 32, 16, 8, 4, 2]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    ("shape", "block"), [((4096,), 256), ((37, 113), 256), ((5,), 7), ((64, 3), 1), ((8, 100), 100)]
)
def test_values_go_to_the_nearest_code(signed, shape, block):
    values = randn(shape, 0) * 10.0 ** randn(shape, 1)
    values = values if signed else values.square()
    block_format = Codes(signed, block, 1)
    stored = block_format.begin(torch.zeros(shape))
    assert block_format.read([stored], F32).count_nonzero() == 0
    block_format.write([stored], values.reshape(-1), None)
    codes, scale = stored
    assert (codes.dtype, codes.shape, scale.shape) == (torch.uint8, values.shape, (-(-values.numel() // block),))
    actual = block_format.read([stored], F32)
    scales = scale.repeat_interleave(block)[: values.numel()]
    assert torch.equal(scale, torch.stack([part.abs().max() for part in values.reshape(-1).split(block)]))
    shares, codebook = values.reshape(-1).double() / scales, dynamic_map(signed=signed).double()
    if not signed:
        # Unsigned values are second moments, of which a positive one is never stored as 0.
        codebook = codebook[1:]
    nearest = (shares.unsqueeze(-1) - codebook).abs().amin(-1)
    error = (actual.double() / scales - shares).abs()
    # The codes are chosen in float16: two values that are equally near there may differ by its rounding.
    assert (error <= nearest + shares.abs() * 2**-10 + 1e-7).all()
    assert float((error <= nearest + 1e-7).double().mean()) > 0.99


def test_a_block_of_zeros_and_a_block_with_nan():
    block_format = Codes(True, 4, 1)
    stored = block_format.begin(torch.zeros(12))
    values = torch.tensor([0.0, 0, 0, 0, 1, math.nan, 2, 3, -1, 0.5, 1e-30, 1])
    block_format.write([stored], values.clone(), None)
    actual = block_format.read([stored], F32)
    assert actual[:4].count_nonzero() == 0
    assert actual[4:8].isnan().all()
    torch.testing.assert_close(actual[8:], values[8:], rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_8_bit_equals_the_formula(path, pretend):
    pretend(path)
    optimizer = optim.adamw_8bit(0.01, weight_decay=0.1, block=100, min_size=1)
    block_formats = {"mu": Codes(True, 100, 1), "nu": Codes(False, 100, 1)}
    params = {"w": randn((50, 61), 0)}
    state = optimizer.init(params)

    def read(state, name):
        return block_formats[name].read([(state[name]["w"], state[name + "_scale"]["w"])], F32).view(50, 61)

    for step in range(5):
        grad = randn((50, 61), 1 + step)

        def store(name, value):
            return value.float()

        p, m, v = adamw_reference(
            params["w"], grad, read(state, "mu"), read(state, "nu"), step + 1, store=store, decay=0.1
        )
        rate = torch.tensor(0.01, dtype=F64) if path == "graph" else 0.01
        params, state = optimizer.update({"w": grad}, state, params, {"lr": rate}, donate=path == "donated")
        torch.testing.assert_close(params["w"], p, rtol=1e-6, atol=1e-7)
        for name, exact in (("mu", m), ("nu", v)):
            stored = block_formats[name].begin(exact)
            block_formats[name].write([stored], exact.reshape(-1).clone(), None)
            assert float((stored[0] != state[name]["w"]).double().mean()) < 1e-3
            torch.testing.assert_close(stored[1], state[name + "_scale"]["w"], rtol=1e-6, atol=0)


def test_small_leaves_stay_in_float32_and_state_is_two_bytes():
    shapes = {f"block{i}": (3072, 1024) for i in range(8)} | {f"norm{i}": (1024,) for i in range(16)}
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    count = sum(leaf.numel() for leaf in params.values())

    def bytes_per_parameter(optimizer):
        return sum(leaf.nbytes for leaf in tree.leaves(optimizer.init(params))) / count

    assert bytes_per_parameter(optim.adamw_8bit(0.1)) < 2.1
    assert bytes_per_parameter(optim.adamw(0.1, state_dtype="bf16")) == pytest.approx(4, abs=1e-6)
    assert bytes_per_parameter(optim.adamw(0.1)) == pytest.approx(8, abs=1e-6)
    state = optim.adamw_8bit(0.1).init(params)
    assert {leaf.dtype for leaf in state["nu"].values()} == {torch.uint8, F32}
    assert state["nu"]["norm0"].dtype == F32
    assert state["nu_scale"]["norm0"].shape == (0,)
    small = {"w": randn((40, 50), 0)}
    assert_same(run(optim.adamw_8bit(0.1), small)[0], run(optim.adamw(0.1), small)[0])


@pytest.mark.parametrize("small", [1e-3, 1e-4, 1e-6])
def test_elements_with_small_gradients_beside_large_ones_take_no_longer_steps_in_8_bits(small):
    """If their second moments were rounded to 0, their steps would be up to 90 times as long."""
    size = torch.full((4096,), small)
    size[::256] = 1.0
    start = {"w": torch.zeros(4096)}
    params_8bit, _ = run(optim.adamw_8bit(1.0), start, steps=50, size=size)
    params_float32, _ = run(optim.adamw(1.0), start, steps=50, size=size)
    assert params_8bit["w"][size < 1].norm() < 1.3 * params_float32["w"][size < 1].norm()


def test_equals_torchaos_8_bit_adamw():
    """Each of 20 steps starts from the state of torchao, so that a differently rounded code has no later effect."""
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    start = {"w": randn((64, 128), 0), "b": randn((100,), 1)}
    optimizer = optim.adamw_8bit(0.01, weight_decay=0.1, decay_mask=optim.everything)
    state = optimizer.init(start)
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in start.items()}
    theirs = torchao.AdamW8bit(leaves.values(), lr=0.01, weight_decay=0.1)
    # torchao compiles its formula; the test compares with the formula, without the rounding of a compiled kernel.
    with torch.compiler.set_stance("force_eager"):
        for step in range(20):
            params = {name: leaf.detach().clone() for name, leaf in leaves.items()}
            grads = {name: randn(leaf.shape, 10 * step + i) for i, (name, leaf) in enumerate(start.items())}
            for name, leaf in leaves.items():
                leaf.grad = grads[name]
            theirs.step()
            params, state = optimizer.update(grads, state, params, {"lr": 0.01})
            torch.testing.assert_close(
                params, {name: leaf.detach() for name, leaf in leaves.items()}, rtol=1e-5, atol=1e-6
            )
            for ours, their in {"mu": "exp_avg", "nu": "exp_avg_sq"}.items():
                moments = {name: theirs.state[leaf][their] for name, leaf in leaves.items()}
                moment, small = moments["w"], moments["b"]
                gap = (moment.codes.int() - state[ours]["w"].int()).abs()
                assert int(gap.max()) <= 1
                assert int(gap.sum()) < 0.02 * gap.numel()
                torch.testing.assert_close(moment.scale, state[ours + "_scale"]["w"], rtol=1e-6, atol=0)
                torch.testing.assert_close(small, state[ours]["b"], rtol=1e-5, atol=1e-8)
                state[ours]["w"].copy_(moment.codes)
                state[ours + "_scale"]["w"].copy_(moment.scale)
                torch.testing.assert_close(dynamic_map(signed=ours == "mu"), moment.qmap, rtol=1e-6, atol=0)


# Laws of all low-precision optimizers


OPTIMIZERS = {
    "nearest": lambda **more: optim.adamw(0.01, state_dtype="bf16", stochastic_rounding=False, **more),
    "stochastic": lambda **more: optim.adamw(0.01, state_dtype="bf16", **more),
    "parameters": lambda **more: optim.adamw(0.01, stochastic_rounding=True, **more),
    "lion": lambda **more: optim.lion(0.01, state_dtype="bf16", **more),
    "sgd": lambda **more: optim.sgd(0.01, momentum=0.9, nesterov=True, state_dtype="bf16", **more),
    "dampened": lambda **more: optim.sgd(0.01, momentum=0.9, dampening=0.5, state_dtype="bf16", **more),
    "no momentum": lambda **more: optim.sgd(0.01, stochastic_rounding=True, **more),
    "8bit": lambda **more: optim.adamw_8bit(0.01, **more),
    "8bit stochastic": lambda **more: optim.adamw_8bit(0.01, block=100, stochastic_rounding=True, **more),
}
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


@optimizers
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_donated_equals_undonated_and_graphs_equal_eager(name, dtype):
    optimizer, params = OPTIMIZERS[name](weight_decay=0.1), make_params(dtype)
    actual = run(optimizer, params)
    assert_same(run(optimizer, params, "donated"), actual)
    graph = run(optimizer, params, "graph", steps=1)
    eager = run(optimizer, params, steps=1)
    for a, b in zip(tree.leaves(graph), tree.leaves(eager), strict=True):
        if a.dtype in (BF16, torch.uint8):
            assert_rounded(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@optimizers
def test_the_memory_layout_of_leaves_makes_no_difference(name):
    """Parameters are transposed or channels-last, and their gradients contiguous."""
    optimizer = OPTIMIZERS[name]()
    plain = {"image": randn((16, 8, 6, 6), 0, BF16), "matrix": randn((70, 90), 1, BF16)}
    strided = {
        "image": plain["image"].clone().to(memory_format=torch.channels_last),
        "matrix": plain["matrix"].t().contiguous().t(),
    }
    actual, expected = run(optimizer, strided, "donated"), run(optimizer, plain)
    assert actual[0]["matrix"].stride() == (1, 70)
    for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert torch.equal(a, b)


@optimizers
def test_a_run_resumed_from_a_checkpoint_has_the_same_bits(name, tmp_path):
    def loss(params, batch):
        return (batch @ params["w"].float()).square().mean() + params["b"].float().square().sum()

    step = ft.train_step(loss, OPTIMIZERS[name]())
    state = step.init({"w": randn((70, 90), 0, BF16), "b": randn((5,), 1)})
    batches = [randn((4, 70), 10 + i) for i in range(4)]
    for batch in batches[:2]:
        state, _ = step(state, batch)
    checkpoint.save(tmp_path / "half", state)
    resumed = checkpoint.load(tmp_path / "half", like=step.init({"w": randn((70, 90), 5, BF16), "b": randn((5,), 6)}))
    for batch in batches[2:]:
        state, _ = step(state, batch)
        resumed, _ = step(resumed, batch)
    assert_same(resumed, state)


class LargestFloat32(TorchDispatchMode):
    """Records in `count` the number of elements of the largest new float32 tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree.leaves(result):
            # Views take no memory of their own.
            if isinstance(leaf, torch.Tensor) and leaf.dtype == F32 and leaf._base is None:
                self.count = max(self.count, leaf.numel())
        return result


@optimizers
def test_no_float32_copy_of_a_long_leaf(name):
    optimizer, params = OPTIMIZERS[name](), {"w": torch.zeros(3 * BLOCK + 100, dtype=BF16)}
    state, grads = optimizer.init(params), tree.map(torch.ones_like, params)
    with LargestFloat32() as largest:
        optimizer.update(grads, state, params, {"lr": 0.1, "rng": random.key(0)}, donate=True)
    assert 0 < largest.count <= BLOCK


def test_inductor_makes_one_graph_that_equals_eager():
    optimizer = optim.partition(
        {
            "rounded": OPTIMIZERS["stochastic"](),
            "coded": optim.adamw_8bit(0.01, block=64, min_size=1),
            "wide": optim.adamw(0.01, amsgrad=True),
        },
        lambda name, leaf: name,
    )
    params = {"coded": randn((30, 40), 0), "rounded": randn((40, 30), 1, BF16), "wide": randn((40, 30), 2)}

    def loss(params, batch):
        return sum((leaf.float().view(40, 30) * batch).sum() for leaf in params.values())

    step = ft.train_step(loss, optimizer)
    compiled = ft.compiled(lowering="whole", donate=True)(step)
    actual, expected = compiled.init(params), step.init(params)
    for index in range(3):
        # Gradients that are exact in bfloat16, because Inductor may omit the rounding to it.
        batch = randn((40, 30), index, BF16).float()
        actual, _ = compiled(actual, batch)
        expected, _ = step(expected, batch)
    assert compiled.lower(compiled.init(params), batch).graphs == 1
    for a, b in zip(tree.leaves(actual.opt_state), tree.leaves(expected.opt_state), strict=True):
        if a.dtype in (BF16, torch.uint8):
            assert_rounded(a, b)
    torch.testing.assert_close(actual.opt_state["wide"], expected.opt_state["wide"], rtol=1e-5, atol=1e-6)
    for name in ("coded", "wide"):
        torch.testing.assert_close(actual.params[name], expected.params[name], rtol=1e-5, atol=1e-6)
    assert_rounded(actual.params["rounded"], expected.params["rounded"])


def test_the_text_names_options_that_are_not_the_default():
    assert optim.adamw(0.1, state_dtype="bf16").text == "adamw(constant(0.1), state_dtype=bf16)"
    assert optim.adam(0.1, stochastic_rounding=True).text == "adam(constant(0.1), stochastic_rounding=True)"
    assert optim.adamw_8bit(0.1, block=128).text == "adamw_8bit(constant(0.1), block=128)"
    assert optim.adamw_8bit(0.1, min_size=8).text == "adamw_8bit(constant(0.1), min_size=8)"
    assert optim.adamw(0.1, state_dtype="bf16").needs_rng
    assert not optim.adamw(0.1, state_dtype="fp32").needs_rng
    assert not optim.adamw_8bit(0.1).needs_rng


def test_wrong_options_are_errors():
    with pytest.raises(OptionError, match="adamw: state_dtype is 'fp16'; choices are None, 'bf16', 'fp32'"):
        optim.adamw(0.1, state_dtype="fp16")
    for option in ("block", "min_size"):
        with pytest.raises(OptionError, match=f"adamw_8bit: {option} is 0, needs a whole number"):
            optim.adamw_8bit(0.1, **{option: 0})
    optimizer = optim.adamw(0.1, state_dtype="bf16", stochastic_rounding=True)
    params = {"w": torch.ones(2)}
    with pytest.raises(OptionError, match="found no key for stochastic rounding"):
        optimizer.update(params, optimizer.init(params), params, {"lr": 0.1})
    with pytest.raises(StructureError, match="adamw_8bit: the optimizer state has count, mu, nu, needs"):
        optim.adamw_8bit(0.1).update(params, optimizer.init(params), params, {"lr": 0.1})


def test_a_window_of_a_format_writes_into_the_stored_tensor():
    block_format, stored = Floats(BF16), (torch.zeros(10, dtype=BF16),)
    block_format.write([window(stored, block_format.block, 2, 5)], torch.ones(3), None)
    assert stored[0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
