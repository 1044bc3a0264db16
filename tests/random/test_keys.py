"""Keys and draws: published vectors, golden bits, the same bits in every mode, and torch operations under Keyed."""

import functools
import itertools
import math
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from ftrain import _torch, random
from ftrain.errors import ComposeError, OptionError, TraceError
from ftrain.random import keys, philox, torch_ops
from ftrain.random.torch_ops import Keyed
from ftrain.random.unfused import Unfused
from ftrain.transforms.remat.checkpoint import recomputed

INT64 = st.integers(-(2**63), 2**64 - 1)
WORD = st.integers(0, 2**32 - 1)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float32, torch.float16, torch.bfloat16)
FEW = settings(max_examples=30, deadline=None)

# (counter, key, result) of philox4x32-10 from the file kat_vectors of Random123 (Salmon et al. 2011).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def parse_words(text):
    """Return the integers of hexadecimal words."""
    return [int(word, 16) for word in text.split()]


def same(a, b):
    """Check that two trees of tensors have the same bits, also of NaN and -0.0, the same dtypes and shapes."""
    a, b = (torch.utils._pytree.tree_leaves(tree) for tree in (a, b))
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def all_draws(key, x):
    """Return a result of each drawing function of `ftrain.random`."""
    return (
        random.bits(key, (3, 5)),
        random.split(key, 3),
        random.fold_in(key, -7),
        random.fold_in(key, key[0]),
        *(random.uniform(key, (7,), dtype=dtype) for dtype in FLOATS),
        random.uniform(key, (2, 3), low=-0.3, high=0.8),
        *(random.normal(key, (9,), dtype=dtype) for dtype in HALVES),
        random.exponential(key, (5,)),
        random.bernoulli(key, 0.3, (11,)),
        random.dropout(key, x, 0.4),
        random.randint(key, (5,), -3, 11),
        random.permutation(key, 6),
    )


# -- the generator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(counter, key, result):
    counter, key, result = parse_words(counter), parse_words(key), parse_words(result)
    words = philox.philox(torch.tensor(key), torch.tensor(counter).unbind())
    assert [int(word) for word in words] == result
    assert list(philox.philox_host(tuple(key), tuple(counter))) == result


@FEW
@given(key=st.tuples(WORD, WORD), counter=st.tuples(WORD, WORD, WORD, WORD))
def test_philox_on_tensors_equals_plain_integers(key, counter):
    words = philox.philox(torch.tensor(key), torch.tensor(counter).unbind())
    assert tuple(map(int, words)) == philox.philox_host(key, counter)


@FEW
@given(seed=INT64, data=INT64)
def test_fold_in_is_the_same_on_the_host(seed, data):
    key = random.key(seed)
    expected = random.fold_in_key_data(random.key_data(key), data)
    assert random.key_data(random.fold_in(key, data)) == random.step_key_data(random.key_data(key), data) == expected
    signed = torch.tensor(data - 2**64 if data >= 2**63 else data)
    assert random.key_data(random.fold_in(key, signed)) == expected
    same(random.fold_in(key, signed.expand(2, 1)), torch.tensor(expected).expand(2, 1, 2))


@FEW
@given(seed=INT64)
def test_key_holds_the_seed(seed):
    key = random.key(seed)
    low, high = random.key_data(key)
    assert key.dtype == torch.int64
    assert (high << 32 | low) == seed % 2**64
    same(random.wrap_key_data((low, high)), key)


def test_counters_beyond_32_bits():
    index = torch.tensor([0, 2**32 - 1, 2**32, 2**32 + 3, 2**40 + 5])
    words = torch.stack(keys._blocks(random.key(5), index, 0), -1).tolist()
    for i, block in zip(index.tolist(), words, strict=True):
        assert tuple(block) == philox.philox_host((5, 0), (i % 2**32, i >> 32, 0, 0))
    assert len({tuple(block) for block in words}) == 5


def test_bits_split_and_fold_in_give_different_words():
    key, num = random.key(3), 4096
    drawn = random.bits(key, (4 * num,)).reshape(-1, 4)[:, :2]
    folded = random.fold_in(key, torch.arange(num))
    keys = torch.cat([drawn, random.split(key, num), folded]).tolist()
    assert len({tuple(pair) for pair in keys}) == 3 * num


def test_children_draw_different_numbers():
    children = random.split(random.key(4), 64)
    drawn = torch.func.vmap(lambda key: random.bits(key, (64,)))(children).reshape(-1, 2).tolist()
    assert len({tuple(pair) for pair in drawn}) == len(drawn)


# -- golden bits: a change of these changes the result of every run -----------------------------------------

GOLDEN = {
    "key": (lambda key: random.key(-2), [4294967294, 4294967295]),
    "split": (lambda key: random.split(key, 2), [1278000592, 2712214839, 1278131739, 30684302]),
    "fold_in": (lambda key: random.fold_in(key, -1), [2204937122, 2932885739]),
    "bits": (
        lambda key: random.bits(key, (6,)),
        [2592828275, 1153470534, 4228819385, 359042194, 1487279343, 1872151666],
    ),
    "uniform fp32": (
        lambda key: random.uniform(key, (3,)),
        ["0x1.3516d60000000p-1", "0x1.1302400000000p-2", "0x1.f81d520000000p-1"],
    ),
    "uniform fp64": (
        lambda key: random.uniform(key, (3,), dtype=torch.float64),
        ["0x1.3516d6e689812p-1", "0x1.f81d53722acd1p-1", "0x1.629853bdbe5b0p-2"],
    ),
    "uniform fp16": (
        lambda key: random.uniform(key, (3,), dtype=torch.float16),
        ["0x1.3500000000000p-1", "0x1.1300000000000p-2", "0x1.f800000000000p-1"],
    ),
    "uniform bf16": (
        lambda key: random.uniform(key, (3,), dtype=torch.bfloat16),
        ["0x1.3400000000000p-1", "0x1.1000000000000p-2", "0x1.f800000000000p-1"],
    ),
    "uniform range": (
        lambda key: random.uniform(key, (3,), low=-0.3, high=0.8),
        ["0x1.74cbd60000000p-2", "-0x1.2c2e640000000p-8", "0x1.90ed0e0000000p-1"],
    ),
    "normal fp32": (
        lambda key: random.normal(key, (4,)),
        ["-0x1.dee4ba0000000p-4", "0x1.fee72e0000000p-1", "0x1.3831360000000p-3", "0x1.69dd2a0000000p-4"],
    ),
    "normal fp16": (
        lambda key: random.normal(key, (4,), dtype=torch.float16),
        ["-0x1.df00000000000p-4", "0x1.ff00000000000p-1", "0x1.3840000000000p-3", "0x1.69c0000000000p-4"],
    ),
    "normal bf16": (
        lambda key: random.normal(key, (4,), dtype=torch.bfloat16),
        ["-0x1.de00000000000p-4", "0x1.fe00000000000p-1", "0x1.3800000000000p-3", "0x1.6a00000000000p-4"],
    ),
    "exponential": (
        lambda key: random.exponential(key, (3,)),
        ["0x1.0267560000000p-1", "0x1.508e200000000p+0", "0x1.fc985c0000000p-7"],
    ),
    "bernoulli": (lambda key: random.bernoulli(key, 0.5, (12,)).int(), [0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1]),
    "dropout": (
        lambda key: random.dropout(key, torch.ones(6), 0.25),
        [
            "0x1.5555560000000p+0",
            "0x1.5555560000000p+0",
            "0x0.0p+0",
            "0x1.5555560000000p+0",
            "0x1.5555560000000p+0",
            "0x1.5555560000000p+0",
        ],
    ),
    "randint": (lambda key: random.randint(key, (5,), -50, 50), [17, 27, 47, -32, -20]),
    "permutation": (lambda key: random.permutation(key, 7), [2, 4, 0, 6, 5, 3, 1]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    draw, expected = GOLDEN[name]
    drawn = draw(random.key(2024)).flatten().tolist()
    assert [x.hex() if isinstance(x, float) else x for x in drawn] == expected


def test_golden_key_data_of_stock_operations():
    assert random.stock_key_data((2024, 0)) == (1937008779, 1801415545)
    assert random.seed_of((2024, 0)) == 3868510427109012549


# The last bits of normal's float64 draws depend on how the platform computes log and cos.
def test_golden_normal_fp64():
    drawn = random.normal(random.key(2024), (2,), dtype=torch.float64)
    expected = torch.tensor([0.999983317211061, -0.0970705468542187], dtype=torch.float64)
    torch.testing.assert_close(drawn, expected, rtol=1e-14, atol=0)


# -- the same bits in every mode ----------------------------------------------------------------------------


def test_traced_and_compiled_are_bitwise_eager():
    key, x = random.key(11), torch.linspace(-1, 1, 10)
    expected = all_draws(key, x)
    traced = make_fx(all_draws, tracing_mode="fake")(random.key(0), x)
    same(traced(key, x), expected)

    # Compiling takes a third of a second per draw, so this has only the draws that no test below compiles.
    def some_draws(key):
        uniform = random.uniform(key, (2, 3), low=-0.3, high=0.8)
        return random.split(key, 3), uniform, random.exponential(key, (5,)), random.randint(key, (5,), -3, 11)

    same(torch.compile(some_draws, backend="aot_eager", fullgraph=True)(key), some_draws(key))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # From the import of Inductor.
def test_inductor_is_bitwise_eager():
    def draw(key, x):
        return random.dropout(key, x, 0.4), random.normal(random.fold_in(key, 1), (33,))

    key, x = random.key(12), torch.linspace(-1, 1, 301)
    same(torch.compile(draw, fullgraph=True)(key, x), draw(key, x))


def test_dynamic_shapes():
    compiled = torch.compile(random.dropout, backend="aot_eager", fullgraph=True, dynamic=True)
    for num in (3, 8, 33):
        x = torch.ones(num)
        same(compiled(random.key(1), x, 0.5), random.dropout(random.key(1), x, 0.5))


def test_vmap_over_keys_equals_a_loop():
    keys, x = random.split(random.key(13), 4), torch.linspace(-1, 1, 10)
    by_key = [all_draws(key, x) for key in keys]
    looped = [torch.stack(results) for results in zip(*by_key, strict=True)]
    same(torch.func.vmap(all_draws, in_dims=(0, None))(keys, x), tuple(looped))


def test_recomputed_draws_are_the_same():
    def block(x, key):
        return random.dropout(key, x.sin(), 0.5).exp()

    def grad(function):
        x = torch.linspace(-1, 1, 32, requires_grad=True)
        return torch.autograd.grad(function(x, random.key(5)).sum(), x)

    same(grad(lambda *a: checkpoint(block, *a, use_reentrant=False, preserve_rng_state=False)), grad(block))


@FEW
@given(small=st.integers(0, 40), large=st.integers(0, 40))
def test_a_small_draw_begins_a_large_one(small, large):
    small, large = sorted((small, large))
    key = random.key(8)
    draws = [random.bits, random.exponential, random.normal, random.uniform]
    draws += [lambda key, shape, f=f: f(key, shape, dtype=torch.float64) for f in draws[1:]]
    draws += [lambda key, shape: random.randint(key, shape, 0, 99)]
    for draw in draws:
        same(draw(key, (small,)), draw(key, (large,))[:small])


# -- for some examples of a batch ---------------------------------------------------------------------------


@FEW
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    shape=st.lists(st.integers(0, 4), max_size=3),
    folds=st.integers(0, 2),
)
def test_pieces_draw_the_numbers_of_their_examples(lengths, shape, folds):
    total, key = sum(lengths), random.key(21)
    draws = [random.bits, random.exponential, random.normal, random.uniform]
    draws += [lambda key, shape, f=f: f(key, shape, dtype=torch.float64) for f in draws[1:]]
    draws += [
        lambda key, shape: random.randint(key, shape, 0, 99),
        lambda key, shape: random.bernoulli(key, 0.5, shape),
    ]
    derive = [lambda key: key, lambda key: random.fold_in(key, 3), lambda key: random.split(key, 5)[4]][folds]
    for draw in draws:
        whole, start = draw(derive(key), (total, *shape)), 0
        for length in lengths:
            actual = draw(derive(random.for_examples(key, start, length)), (length, *shape))
            same(actual, whole[start : start + length])
            start += length


def test_pieces_of_pieces():
    key = random.key(22)
    whole = random.bits(key, (10, 3))
    piece = random.for_examples(random.for_examples(key, 3, 6), 2, 4)
    same(random.bits(piece, (4, 3)), whole[5:9])
    same(random.dropout(piece, torch.ones(4, 3), 0.5), random.dropout(key, torch.ones(10, 3), 0.5)[5:9])


def test_draws_that_are_not_by_example_are_the_same_in_every_piece():
    key = random.key(23)
    pieces = [random.for_examples(key, start, 4) for start in (0, 4, 8)]
    for shape in ((), (5,), (3, 7)):
        for piece in pieces:
            same(random.normal(piece, shape), random.normal(key, shape))
    for derive in (lambda key: random.split(key, 3), lambda key: random.fold_in(key, 1)):
        for piece in pieces:
            # Behind the two words of its key, the key of a piece holds where the piece begins.
            same(derive(piece)[..., :2], derive(key))
    assert {random.key_data(piece) for piece in pieces} == {random.key_data(key)}
    with pytest.raises(OptionError, match=r"for_examples: start = -1, length = 2"):
        random.for_examples(key, -1, 2)
    with pytest.raises(OptionError, match=r"for_examples: start = 0, length = 0"):
        random.for_examples(key, 0, 0)


@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_keys_of_examples_under_vmap_draw_different_numbers_in_every_piece(size):
    drawn = []
    for start in (0, 3):
        keys = random.split(random.for_examples(random.key(24), start, 3), 3)
        drawn += torch.func.vmap(lambda key: random.bits(key, (size,)))(keys).reshape(-1).tolist()
        drawn += torch.func.vmap(lambda key: random.bits(random.fold_in(key, 1), ()))(keys).tolist()
    assert len(set(drawn)) == len(drawn)


def test_keys_of_numbered_examples_under_vmap_draw_the_same_in_a_piece():
    def draw(key, numbers):
        keys = random.fold_in(key[:2], numbers)
        return torch.func.vmap(lambda key: random.normal(random.fold_in(key, 1), (3,)))(keys)

    key, numbers = random.key(24), torch.tensor([7, 3, 9, 4, 0])
    same(draw(random.for_examples(key, 2, 3), numbers[2:]), draw(key, numbers)[2:])


def test_pieces_traced_compiled_and_under_vmap():
    """One graph serves every piece, because the start of a piece is an input."""

    def draws(key):
        return random.normal(key, (4, 3)), random.bernoulli(random.fold_in(key, 1), 0.5, (8, 3)), random.bits(key, ())

    keys = torch.stack([random.for_examples(random.key(25), start, 4) for start in (0, 4, 9)])
    expected = [draws(key) for key in keys]
    traced = make_fx(draws, tracing_mode="fake")(keys[0])
    assert not [node for node in traced.graph.nodes if node.op == "get_attr"]
    compiled = torch.compile(draws, backend="aot_eager", fullgraph=True)
    for key, drawn in zip(keys, expected, strict=True):
        same(traced(key), drawn)
        same(compiled(key), drawn)
    normals, masks, _ = zip(*expected, strict=True)
    same(torch.func.vmap(lambda key: draws(key)[:2])(keys), (torch.stack(normals), torch.stack(masks)))


def test_stock_operations_for_some_examples():
    key, x = random.key(26), torch.linspace(-1, 1, 40).reshape(8, 5)

    def draw(x):
        return F.dropout(x, 0.5), F.dropout1d(x, 0.5), torch.rand_like(x), torch.randn(len(x), 3, dtype=torch.float64)

    with Keyed(key) as stream:
        before, whole = torch.rand(2), draw(x)
    end = stream.offset
    with Keyed(key) as stream:
        same(torch.rand(2), before)
        start = stream.offset
        with stream.for_examples(0, 3, start):
            same(draw(x[:3]), tuple(tensor[:3] for tensor in whole))
        with stream.for_examples(3, 5, start):
            with stream.for_examples(1, 4, stream.offset):
                same(draw(x[4:]), tuple(tensor[4:] for tensor in whole))
            with stream.rewound(start):
                F.dropout(x[3:], 0.5)
        assert stream.offset == end
        assert stream.examples is None
        after = torch.rand(3)
    with Keyed(key) as stream:
        stream.offset = end
        same(torch.rand(3), after)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
def test_shapes(shape):
    key = random.key(9)
    size = math.prod(shape)
    for draw in (random.bits, random.uniform, random.normal, random.exponential):
        assert draw(key, shape).shape == shape
        same(draw(key, shape).reshape(-1), draw(key, (size,)))
    assert random.bernoulli(key, 0.5, shape).shape == shape
    assert random.dropout(key, torch.ones(shape), 0.5).shape == shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: compares its bits with the CPU's")
def test_gpu_draws_the_same_bits():
    key, x = random.key(11), torch.linspace(-1, 1, 10)
    on_gpu = all_draws(key.cuda(), x.cuda())
    assert all(tensor.is_cuda for tensor in on_gpu)
    same([tensor.cpu() for tensor in on_gpu], list(all_draws(key, x)))
    with Keyed(key):
        drawn = F.dropout(x.cuda(), 0.5)
    # Equal, but not the same bits: on a CPU torch multiplies by 0, so that a dropped negative number is -0.0.
    with Keyed(key):
        assert torch.equal(drawn.cpu(), F.dropout(x, 0.5))


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    all_draws(random.key(0), torch.ones(10))
    with Keyed(random.key(0)):
        F.dropout(torch.randn(8), 0.5)
    same(torch.get_rng_state(), before)


# -- distributions (with fixed seeds, so that a test passes always or never) --------------------------------

MANY = 1 << 16


def test_the_values_of_each_byte_are_equally_frequent():
    words = random.bits(random.key(21), (MANY,))
    assert 0 <= int(words.min()) < int(words.max()) < 2**32
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((words >> shift) & 255, minlength=256).double()
        # Chi-squared of 255 degrees of freedom has the mean 255 and the variance 510.
        chi2 = float(((counts - MANY / 256) ** 2).sum() / (MANY / 256))
        assert 255 - 5 * math.sqrt(510) < chi2 < 255 + 5 * math.sqrt(510)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("draw", "mean", "variance", "fourth"),
    [
        (random.uniform, 0.5, 1 / 12, 1 / 80),
        (random.normal, 0.0, 1.0, 3.0),
        (random.exponential, 1.0, 1.0, 9.0),
    ],
)
def test_moments(draw, mean, variance, fourth, dtype):
    drawn = draw(random.key(22), (MANY,), dtype=dtype)
    assert drawn.dtype == dtype
    drawn = drawn.double()
    # A uniform draw of few digits is rounded down, so that its mean is lower by half a step.
    step = torch.finfo(dtype).eps / 4 if draw is random.uniform else torch.finfo(dtype).eps / 8
    assert abs(float(drawn.mean()) - mean) < 4 * math.sqrt(variance / MANY) + step
    assert abs(float(drawn.var()) - variance) < 4 * math.sqrt((fourth - variance**2) / MANY) + step
    for lag in (1, 2, 4):
        products = (drawn[lag:] - mean) * (drawn[:-lag] - mean)
        assert abs(float(products.mean())) < 4 * variance / math.sqrt(MANY) + step


def test_normal_tails():
    drawn = random.normal(random.key(23), (MANY,), dtype=torch.float64)
    for bound in (0.5, 1.0, 2.0, 3.0):
        p = math.erfc(bound / math.sqrt(2))
        share = float((drawn.abs() > bound).double().mean())
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / MANY)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.99])
def test_bernoulli_rate(p):
    drawn = random.bernoulli(random.key(24), p, (MANY,))
    assert drawn.dtype == torch.bool
    assert abs(float(drawn.double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / MANY)
    same(drawn, random.bits(random.key(24), (MANY,)) < round(p * 2**32))


def test_randint_and_permutation():
    drawn = random.randint(random.key(25), (MANY,), -3, 5)
    counts = torch.bincount(drawn + 3, minlength=8).double()
    assert counts.numel() == 8
    assert float(((counts - MANY / 8) ** 2).sum() / (MANY / 8)) < 7 + 5 * math.sqrt(14)
    wide = random.randint(random.key(25), (MANY,), -(2**61), 2**61)
    assert int(wide.min()) < -(2**60)
    assert int(wide.max()) > 2**60
    orders = torch.stack([random.permutation(key, 3) for key in random.split(random.key(26), 60)])
    same(orders.sort(-1).values, torch.arange(3).expand(60, 3))
    assert len({tuple(order) for order in orders.tolist()}) == 6
    assert random.permutation(random.key(0), 0).shape == (0,)


# -- ranges -------------------------------------------------------------------------------------------------


def fixed_word(word):
    """Make the generator return `word` for every word of every block."""
    return mock.patch.object(keys, "philox", lambda key, counter: (torch.full_like(counter[0], word),) * 4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_unit_uniform_is_every_multiple_below_one(dtype):
    key, digits = random.key(0), keys._DIGITS[dtype]
    with fixed_word(2**32 - 1):
        assert float(random.uniform(key, (), dtype=dtype)) == 1 - 2.0**-digits
    with fixed_word(0):
        assert float(random.uniform(key, (), dtype=dtype)) == 0
    if digits == 8:
        values = random.uniform(key, (MANY,), dtype=dtype).unique()
        same(values, (torch.arange(256) / 256).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@FEW
@given(low=st.floats(-50, 50), width=st.floats(0.5, 50))
def test_uniform_stays_inside_its_range(dtype, low, width):
    high = low + width
    for word in (0, 1, 2**31, 2**32 - 1):
        with fixed_word(word):
            drawn = random.uniform(random.key(0), (4,), dtype=dtype, low=low, high=high)
        assert drawn.dtype == dtype
        assert all(low <= x < high for x in drawn.tolist())
        near = low + (high - low) * word / 2**32
        assert all(abs(x - near) < max(128 * torch.finfo(dtype).eps, 1e-7) for x in drawn.tolist())


@pytest.mark.parametrize("dtype", FLOATS)
@given(value=st.floats(-60000, 60000))
def test_round_down_gives_the_largest_number_that_is_not_above(dtype, value):
    below = torch.tensor(keys._round_down(value, dtype), dtype=dtype)
    assert float(below) == keys._round_down(value, dtype) <= value
    assert float(torch.nextafter(below, torch.tensor(math.inf, dtype=dtype))) > value


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_bits_give_finite_draws(dtype):
    for word in (0, 2**32 - 1):
        with fixed_word(word):
            assert random.normal(random.key(0), (4,), dtype=dtype).isfinite().all()
            drawn = random.exponential(random.key(0), (4,), dtype=dtype)
        assert (drawn.isfinite() & (drawn > 0)).all()


# -- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_and_its_gradient(dtype):
    x = torch.linspace(1, 2, 64, dtype=dtype, requires_grad=True)
    y = random.dropout(random.key(31), x, 0.25)
    keep = random.bernoulli(random.key(31), 0.75, (64,))
    same(y.detach(), torch.where(keep, x.detach() * (1 / 0.75), 0.0))
    (grad,) = torch.autograd.grad(y.sum(), x)
    same(grad, keep.to(dtype) * (1 / 0.75))
    assert 0 < int(keep.sum()) < 64


def test_dropout_with_probability_0_and_1():
    x = torch.tensor([1.0, torch.finfo(torch.float32).max], requires_grad=True)
    assert random.dropout(random.key(0), x, 0.0) is x
    dropped = random.dropout(random.key(0), x, 1.0)
    same(dropped.detach(), torch.zeros(2))
    same(torch.autograd.grad(dropped.sum(), x)[0], torch.zeros(2))


def test_dropout_never_makes_nan():
    x = torch.full((64,), torch.finfo(torch.float32).max, requires_grad=True)
    y = random.dropout(random.key(0), x, 0.5)
    assert set(y.tolist()) == {0.0, math.inf}
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_dropout_takes_a_key_on_another_device():
    assert random.dropout(random.key(0), torch.ones(3, device="meta"), 0.5).device.type == "meta"


def test_bernoulli_with_probability_0_and_1():
    assert random.bernoulli(random.key(0), 1.0, (MANY,)).all()
    assert not random.bernoulli(random.key(0), 0.0, (MANY,)).any()
    with fixed_word(2**32 - 1):
        assert random.bernoulli(random.key(0), 1, ())
    with fixed_word(0):
        assert not random.bernoulli(random.key(0), 0, ())


# -- errors -------------------------------------------------------------------------------------------------

KEY = random.key(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random.key(2**64), f"key: seed = {2**64} does not fit"),
        (lambda: random.key(-(2**63) - 1), "key: seed = -9223372036854775809 does not fit"),
        (lambda: random.fold_in(KEY, 2**64), "fold_in: data = "),
        (lambda: random.fold_in_key_data((0, 0), 2**64), "fold_in_key_data: data = "),
        (lambda: random.fold_in(KEY, torch.tensor(1.0)), "fold_in: data has dtype torch.float32"),
        (lambda: random.split(KEY.float()), "split: the key has shape .* dtype torch.float32"),
        (lambda: random.bits(torch.zeros(3, dtype=torch.int64), ()), r"bits: the key has shape \(3,\)"),
        (lambda: random.normal(KEY, (-1,)), r"normal: shape = \(-1,\)"),
        (lambda: random.normal(KEY, 3), "normal: shape = 3; needs a sequence of sizes"),
        (lambda: random.normal(0, (3,)), "normal: the key is int; needs a tensor"),
        (lambda: random.dropout(None, torch.ones(2), 0.1), "dropout: the key is None; .* None in an evaluation"),
        (lambda: random.dropout(KEY, 0.1, torch.ones(2)), r"dropout: p = tensor.*; needs a probability"),
        (lambda: random.normal(KEY, (1,), dtype=torch.int64), "normal: dtype = torch.int64"),
        (lambda: random.uniform(KEY, (1,), low=1.0, high=1.0), "uniform: low = 1.0, high = 1.0"),
        (lambda: random.uniform(KEY, (1,), low=math.nan), "uniform: low = nan"),
        (lambda: random.uniform(KEY, (1,), high=math.inf), "uniform: low = 0.0, high = inf"),
        (lambda: random.uniform(KEY, (1,), low=1 + 1e-9, high=1 + 2e-9), "torch.float32 has no value in"),
        (lambda: random.bernoulli(KEY, 1.5, ()), "bernoulli: p = 1.5"),
        (lambda: random.bernoulli(KEY, math.nan, ()), "bernoulli: p = nan"),
        (lambda: random.bernoulli(KEY, torch.tensor(0.5), ()), "bernoulli: p = 0.5; needs a probability"),
        (lambda: random.dropout(KEY, torch.ones(2), -0.1), "dropout: p = -0.1"),
        (lambda: random.dropout(KEY, torch.ones(2, dtype=torch.int64), 0.1), "dropout: x has dtype torch.int64"),
        (lambda: random.randint(KEY, (1,), 3, 3), "randint: low = 3, high = 3"),
        (lambda: random.randint(KEY, (1,), 0, 1e3), "randint: low = 0, high = 1000.0; needs integers"),
        (lambda: random.randint(KEY, (1,), -(2**63) + 1, 2**62), "randint: low = "),
    ],
)
def test_errors_name_function_and_value(call, message):
    with pytest.raises(OptionError, match=message):
        call()


@pytest.mark.parametrize("seed", [0.5, None, "0", KEY, torch.tensor(0.5)])
def test_a_seed_must_be_an_integer(seed):
    with pytest.raises(ComposeError, match=f"key: seed is {re.escape(repr(seed))}, needs a whole number"):
        random.key(seed)


# -- stock operations under Keyed ---------------------------------------------------------------------------


def stock(x):
    """Return pairs: a call of a random operation of torch, and a function from a key to what it must draw."""
    half = torch.full((8,), 0.5)
    return [
        (lambda: torch.rand(8), lambda k: random.uniform(k, (8,))),
        (lambda: torch.rand(8, generator=None), lambda k: random.uniform(k, (8,))),
        (lambda: torch.rand(2, dtype=torch.float64), lambda k: random.uniform(k, (2,), dtype=torch.float64)),
        (lambda: torch.rand_like(x.half()), lambda k: random.uniform(k, (8,), dtype=torch.float16)),
        (lambda: torch.empty(8).uniform_(-2, 3), lambda k: random.uniform(k, (8,), low=-2, high=3)),
        (lambda: torch.empty(8).uniform_(2, 2), lambda k: torch.full((8,), 2.0)),
        (lambda: torch.randn(2, 4), lambda k: random.normal(k, (2, 4))),
        (lambda: torch.randn_like(x), lambda k: random.normal(k, (8,))),
        (lambda: torch.empty(8).normal_(1, 2), lambda k: random.normal(k, (8,)) * 2 + 1),
        (lambda: torch.normal(1.0, 2.0, (8,)), lambda k: random.normal(k, (8,)) * 2 + 1),
        (lambda: torch.normal(half, 2.0), lambda k: random.normal(k, (8,)) * 2 + 0.5),
        (lambda: torch.normal(1.0, half), lambda k: random.normal(k, (8,)) * 0.5 + 1),
        (lambda: torch.normal(half, half), lambda k: random.normal(k, (8,)) * 0.5 + 0.5),
        (lambda: torch.empty(8).exponential_(2), lambda k: random.exponential(k, (8,)) / 2),
        (lambda: torch.bernoulli(half), lambda k: random.bernoulli(k, 0.5, (8,)).float()),
        (lambda: torch.bernoulli(x, 0.3), lambda k: random.bernoulli(k, 0.3, (8,)).float()),
        (lambda: torch.empty(8).bernoulli_(0.3), lambda k: random.bernoulli(k, 0.3, (8,)).float()),
        (lambda: torch.empty(8).bernoulli_(half), lambda k: random.bernoulli(k, 0.5, (8,)).float()),
        (lambda: torch.randint(9, (8,)), lambda k: random.randint(k, (8,), 0, 9)),
        (lambda: torch.randint(-4, 9, (8,), dtype=torch.int32), lambda k: random.randint(k, (8,), -4, 9).int()),
        (lambda: torch.randint_like(x, 9), lambda k: random.randint(k, (8,), 0, 9).float()),
        (lambda: torch.empty(8).random_(2, 9), lambda k: random.randint(k, (8,), 2, 9).float()),
        (lambda: torch.empty(8).random_(9), lambda k: random.randint(k, (8,), 0, 9).float()),
        (lambda: torch.randperm(8), lambda k: random.permutation(k, 8)),
        (lambda: torch.native_dropout(x, 0.4, True)[0], lambda k: random.dropout(k, x, 0.4)),
        (lambda: F.dropout(half, 0.5), lambda k: random.dropout(k, half, 0.5)),
    ]


def test_each_stock_operation_draws_from_a_fold_of_the_key():
    key, cases = random.key(41), stock(torch.linspace(-1, 1, 8))
    assert len(cases) < torch_ops._CHUNK
    cases *= 2  # More than the first chunk of keys.
    with Keyed(key) as stream:
        drawn = [draw() for draw, _ in cases]
    assert stream.offset == len(cases)
    same(drawn, [expected(random.fold_in(key, n)) for n, (_, expected) in enumerate(cases)])


def test_modules_draw_by_key_and_repeat_when_rewound():
    net = nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.5))
    x = torch.ones(4, 8, 8)

    def draw(seed):
        with Keyed(random.key(seed)) as stream:
            first, offset = net(x), stream.offset
            second = net(x)
            with stream.rewound(0):
                again = net(x)
            with stream.rewound(offset):
                same(net(x), second)
            assert stream.offset == 2 * offset == 6
        same(again, first)
        return first, second

    same(draw(1), draw(1))
    drawn = [*draw(1), *draw(2)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_rewound_restores_the_offset_after_an_error():
    stream = Keyed(random.key(0))
    stream.offset = 5

    def fail():
        with stream.rewound(2):
            raise ValueError(f"at {stream.offset}")

    with pytest.raises(ValueError, match="at 2"):
        fail()
    assert stream.offset == 5


def test_the_current_stream_is_the_innermost():
    assert torch_ops.current() is None
    with Keyed(random.key(0)) as outer:
        assert torch_ops.current() is outer
        with Keyed(random.key(1)) as inner:
            assert torch_ops.current() is inner
            torch.rand(1)
        assert (torch_ops.current(), outer.offset, inner.offset) == (outer, 0, 1)
    assert torch_ops.current() is None


def test_a_recomputation_that_is_rewound_gives_the_same_gradient():
    def block(x):
        return F.dropout(x.sin(), 0.5).exp()

    def repeatable(offset, x):
        with torch_ops.current().rewound(offset):
            return block(x)

    def grad(remat):
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        with Keyed(random.key(6)) as stream:
            y = recomputed(block, functools.partial(repeatable, stream.offset), (x,), {}) if remat else block(x)
            return torch.autograd.grad(y.sum(), x)[0]

    same(grad(remat=True), grad(remat=False))
    assert 0 < int((grad(remat=True) == 0).sum()) < 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = F.dropout(self.inner(x), 0.2) + torch.randn(16)
        x = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0]
        return self.outer(F.dropout1d(x, 0.5)).square().mean()


def test_a_traced_gradient_has_no_random_operation_and_the_same_bits():
    torch.manual_seed(0)
    net = Net()
    params, x = dict(net.named_parameters()), torch.randn(4, 8)

    def step(key, x, params):
        leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        with Keyed(key):
            loss = torch.func.functional_call(net, leaves, (x,))
            return loss, torch.autograd.grad(loss, list(leaves.values()))

    before = torch.get_rng_state()
    traced = make_fx(step, tracing_mode="fake")(random.key(0), x, params)
    operations = [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert len(operations) > 100
    assert not [op for op in operations if torch.Tag.nondeterministic_seeded in op.tags]
    assert not [node for node in traced.graph.nodes if node.op == "get_attr"]
    losses = set()
    for seed in (0, 1):
        same(traced(random.key(seed), x, params), step(random.key(seed), x, params))
        losses.add(traced(random.key(seed), x, params)[0].item())
    assert len(losses) == 2
    same(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: torch.poisson(torch.ones(2)), "aten.poisson.default draws .* ftrain.random"),
        (lambda: torch.multinomial(torch.ones(3), 1), "aten.multinomial.default"),
        (lambda: torch.binomial(torch.ones(2), torch.ones(2)), "aten.binomial.default"),
        (lambda: torch.rand(2, out=torch.empty(2)), "aten.rand.out"),
        (lambda: F.rrelu(torch.ones(2), training=True), "aten.rrelu_with_noise.default"),
        (lambda: torch.empty(2).random_(), "aten.random_.default"),
        (lambda: torch.empty(2).random_(3, None), "aten.random_.from draws"),
        (lambda: torch.rand(2, generator=torch.Generator()), "aten.rand.generator has a generator"),
        (lambda: torch.empty(2).normal_(generator=torch.Generator()), "has a generator"),
    ],
)
def test_operations_without_a_keyed_form_are_refused(draw, message):
    before = torch.get_rng_state()
    with Keyed(random.key(0)) as stream, pytest.raises(TraceError, match=message):
        draw()
    same(torch.get_rng_state(), before)
    assert stream.offset == 0


def test_fused_attention_is_refused_only_with_dropout():
    q = torch.linspace(-1, 1, 32).reshape(1, 1, 4, 8)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    expected = F.scaled_dot_product_attention(q, q, q)
    with Keyed(random.key(0)) as stream:
        same(F.scaled_dot_product_attention(q, q, q), expected)
        same(fused(q, q, q)[0], expected)
        with pytest.raises(TraceError, match="sdpa_kernel"):
            fused(q, q, q, 0.1)
        with pytest.raises(TraceError, match="_scaled_dot_product_flash_attention"):
            flash(q, q, q, dropout_p=0.1)
        same(F.rrelu(q, training=False), F.rrelu(q))
        assert stream.offset == 0
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        assert stream.offset == 1


class Kernels(_torch.TorchDispatchMode):
    """Records for each operation which fused kernels of GPUs, which draw random numbers, are enabled."""

    def __init__(self):
        super().__init__()
        self.fused = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sdp, recurrent = torch.backends.cuda, torch.backends.cudnn.enabled
        self.fused.append(
            (sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.cudnn_sdp_enabled(), recurrent)
        )
        return func(*args, **(kwargs or {}))


def attend(x, rate):
    return F.scaled_dot_product_attention(query=x, key=x, value=x, dropout_p=rate)


def heads(rate, device):
    model = nn.MultiheadAttention(8, 2, rate, device=device)
    return lambda x: model(x, x, x, need_weights=False)


def recurrent(rate, device):
    return nn.LSTM(8, 8, 2, dropout=rate, device=device)


def recurrent_packed(rate, device):
    model = nn.GRU(8, 8, 2, dropout=rate, device=device)
    return lambda x: model(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 4, 2])))


MODELS = [lambda rate, _: functools.partial(attend, rate=rate), heads, recurrent, recurrent_packed]


@pytest.mark.parametrize("make", MODELS, ids=["attention", "heads", "recurrent", "packed"])
def test_fused_kernels_with_dropout_are_off_except_on_the_host(make):
    def fused(rate, device):
        model = make(rate, device)
        with Keyed(random.key(0)) as stream, Kernels() as kernels:
            model(torch.ones(4, 3, 8, device=device))
        assert stream.offset == (rate > 0)
        return set(kernels.fused)

    assert (False,) * 4 in fused(0.5, "meta")
    assert fused(0.0, "meta") == fused(0.5, "cpu") == {(True,) * 4}


def test_fused_kernels_with_dropout_are_off_in_a_recomputation():
    def repeatable(offset, x):
        with torch_ops.current().rewound(offset), kernels:
            return attend(x, 0.5)

    x, kernels = torch.ones(1, 1, 4, 8, device="meta", requires_grad=True), Kernels()
    with Keyed(random.key(0)) as stream:
        y = recomputed(lambda x: attend(x, 0.5), functools.partial(repeatable, stream.offset), (x,), {})
        torch.autograd.grad(y.sum(), x)
    assert (False,) * 4 in kernels.fused


def test_inference_mode_draws_the_same():
    x = torch.ones(2, 4, 8)
    for module in (nn.Dropout(0.5), nn.Dropout1d(0.5)):
        with Keyed(random.key(2)):
            expected = module(x)
        with Keyed(random.key(2)), torch.inference_mode():
            drawn = module(x)
        same(drawn.clone(), expected)


def test_two_unfused_modes_work_in_inference_mode():
    with Keyed(random.key(2)), torch.inference_mode(), Unfused(), Unfused():
        assert attend(torch.ones(1, 1, 4, 8, device="meta"), 0.5).is_meta


def test_draws_are_on_the_device_of_the_call():
    with Keyed(random.key(0)):
        assert torch.rand(2, device="meta").device.type == "meta"
        assert F.dropout(torch.ones(2, device="meta"), 0.5).device.type == "meta"


def test_keyed_inside_vmap_is_refused():
    def draw(key):
        with Keyed(key):
            return torch.rand(2)

    with pytest.raises(TraceError, match="outside of vmap"):
        torch.func.vmap(draw, randomness="different")(random.split(random.key(0)))


def test_vmap_inside_keyed_draws_different_numbers_for_each_row():
    with Keyed(random.key(0)):
        drawn = torch.func.vmap(lambda x: F.dropout(x, 0.5), randomness="different")(torch.ones(3, 32))
    assert len({tuple(row) for row in drawn.tolist()}) == 3


@pytest.mark.parametrize("function", [F.silu, F.mish, F.gelu, F.softplus], ids=lambda function: function.__name__)
def test_operations_that_draw_nothing_have_the_same_bits_under_keyed(function):
    """A first step runs under `Keyed`; if the loss draws nothing, later steps run without it."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    with Keyed(random.key(0)):
        (actual,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(actual, expected)
