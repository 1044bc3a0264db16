"""Laws of all optimizers with moments or parameters in 16 or 8 bits, and the options that they refuse."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain import checkpoint, optim, random, tree
from ftrain.errors import OptionError, StructureError
from ftrain.optim.grouping import BLOCK
from tests.parity.low_precision import BF16, F32, assert_bitwise, assert_rounded, make_params, randn, run

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
    assert_bitwise(run(optimizer, params, "donated"), actual)
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
    assert_bitwise(resumed, state)


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
