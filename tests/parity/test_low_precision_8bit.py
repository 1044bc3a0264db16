"""AdamW with moments in codes of 8 bits: the nearest codes are stored, and it equals the formula and torchao."""

import math

import pytest
import torch

from ftrain import optim, tree
from ftrain.optim.formats import Codes, dynamic_map
from tests.parity.low_precision import F32, F64, PATHS, adamw_reference, assert_bitwise, randn, run


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
    # A share is rounded to float16, by up to 2^-11 of itself, before the nearest code is looked up. The code of the
    # rounded share is farther from the share than the nearest one by at most twice that.
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


def test_the_state_takes_two_bytes_for_each_parameter():
    shapes = {f"block{i}": (3072, 1024) for i in range(8)} | {f"norm{i}": (1024,) for i in range(16)}
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    count = sum(leaf.numel() for leaf in params.values())

    def bytes_per_parameter(optimizer):
        return sum(leaf.nbytes for leaf in tree.leaves(optimizer.init(params))) / count

    assert bytes_per_parameter(optim.adamw_8bit(0.1)) < 2.1
    assert bytes_per_parameter(optim.adamw(0.1, state_dtype="bf16")) == pytest.approx(4, abs=1e-6)
    assert bytes_per_parameter(optim.adamw(0.1)) == pytest.approx(8, abs=1e-6)


def test_leaves_with_fewer_elements_than_min_size_stay_in_float32():
    # `min_size` is 4096 by default.
    params = {"large": torch.zeros(4096), "small": torch.zeros(4095)}
    state = optim.adamw_8bit(0.1).init(params)
    assert {name: leaf.dtype for name, leaf in state["nu"].items()} == {"large": torch.uint8, "small": F32}
    assert {name: leaf.shape for name, leaf in state["nu_scale"].items()} == {"large": (16,), "small": (0,)}
    small = {"w": randn((40, 50), 0)}
    assert_bitwise(run(optim.adamw_8bit(0.1), small)[0], run(optim.adamw(0.1), small)[0])


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
