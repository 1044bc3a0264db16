"""`Keyed`: torch's own random operations draw from a key, or are refused."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from ftrain import random
from ftrain.errors import OptionError, TraceError
from ftrain.random import torch_ops
from ftrain.random.torch_ops import Keyed
from ftrain.transforms.remat.checkpoint import recomputed
from tests.random.draws import assert_same_bits


def operations(x):
    """Return pairs of a call of a random operation of torch, and a function from a key to the same draw by ftrain."""
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


def test_each_operation_draws_from_a_fold_of_the_key():
    key, cases = random.key(41), operations(torch.linspace(-1, 1, 8))
    assert len(cases) < torch_ops._CHUNK
    cases *= 2  # Twice, so that they need more than the first chunk of keys.
    with Keyed(key) as keyed:
        drawn = [draw() for draw, _ in cases]
    assert keyed.offset == len(cases)
    assert_same_bits(drawn, [expected(random.fold_in(key, n)) for n, (_, expected) in enumerate(cases)])


def dropouts():
    """Return a module that draws three times."""
    return nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.5))


def test_modules_draw_by_the_key_and_differently_at_each_call():
    module, x = dropouts(), torch.ones(4, 8, 8)

    def draw_twice(seed):
        with Keyed(random.key(seed)):
            return module(x), module(x)

    assert_same_bits(draw_twice(1), draw_twice(1))
    drawn = [*draw_twice(1), *draw_twice(2)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_rewound_repeats_the_draws_from_an_offset_on():
    module, x = dropouts(), torch.ones(4, 8, 8)
    with Keyed(random.key(1)) as keyed:
        first, second = module(x), module(x)
        with keyed.rewound(0):
            assert_same_bits(module(x), first)
        with keyed.rewound(3):
            assert_same_bits(module(x), second)
        assert keyed.offset == 6


def test_rewound_restores_the_offset_after_an_error():
    keyed = Keyed(random.key(0))
    keyed.offset = 5

    def fail():
        with keyed.rewound(2):
            raise ValueError(f"at {keyed.offset}")

    with pytest.raises(ValueError, match="at 2"):
        fail()
    assert keyed.offset == 5


def test_the_current_context_is_the_innermost():
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

    def recompute(offset, x):
        with torch_ops.current().rewound(offset):
            return block(x)

    def gradient(remat):
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        with Keyed(random.key(6)) as keyed:
            y = recomputed(block, functools.partial(recompute, keyed.offset), (x,), {}) if remat else block(x)
            return torch.autograd.grad(y.sum(), x)[0]

    assert_same_bits(gradient(remat=True), gradient(remat=False))
    assert 0 < int((gradient(remat=True) == 0).sum()) < 64  # Some are dropped, and some are kept.


class Net(nn.Module):
    """Dropout, noise and attention with dropout."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = F.dropout(self.inner(x), 0.2) + torch.randn(16)
        x = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0]
        return self.outer(F.dropout1d(x, 0.5)).square().mean()


def test_a_traced_gradient_has_no_random_operation_and_the_same_bits():
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
    first, second = (traced(random.key(seed), x, params) for seed in (0, 1))
    assert_same_bits(first, step(random.key(0), x, params))
    assert_same_bits(second, step(random.key(1), x, params))
    assert first[0] != second[0]
    assert_same_bits(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: torch.randint(257, (2,), dtype=torch.uint8),
            "randint: low = 0, high = 257; torch.uint8 does not have",
        ),
        (lambda: torch.empty(2, dtype=torch.int8).random_(-129, 0), "randint: low = -129, high = 0; torch.int8 does"),
        (lambda: torch.randint(3, (2,), dtype=torch.bool), "randint: low = 0, high = 3; torch.bool does not have"),
        (lambda: torch.randint(65506, (2,), dtype=torch.float16), "randint: .* torch.float16 does not have all"),
        (lambda: torch.randperm(129, dtype=torch.int8), "randperm: n = 129; torch.int8 does not have all"),
        (lambda: torch.randperm(2050, dtype=torch.float16), "randperm: n = 2050; torch.float16 does not have all"),
        (lambda: torch.empty(2).normal_(0, -1), "normal: std = -1.0; needs a number of at least 0"),
        (lambda: torch.empty(2).exponential_(0), "exponential: lambd = 0.0; needs a number above 0"),
    ],
)
def test_what_torch_refuses_to_draw_is_refused(draw, message):
    with pytest.raises(RuntimeError):
        draw()
    with Keyed(random.key(0)), pytest.raises(OptionError, match=message):
        draw()


def test_draws_take_the_whole_range_of_a_narrow_dtype():
    with Keyed(random.key(0)):
        assert torch.randint(256, (9000,), dtype=torch.uint8).unique().numel() == 256
        assert torch.randperm(128, dtype=torch.int8).unique().numel() == 128
        assert torch.randperm(2049, dtype=torch.float16).unique().numel() == 2049
        assert torch.randint(2, (99,), dtype=torch.bool).unique().numel() == 2


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
    with Keyed(random.key(0)) as keyed, pytest.raises(TraceError, match=message):
        draw()
    assert_same_bits(torch.get_rng_state(), before)
    assert keyed.offset == 0


def test_inference_mode_draws_the_same():
    x = torch.ones(2, 4, 8)
    for module in (nn.Dropout(0.5), nn.Dropout1d(0.5)):
        with Keyed(random.key(2)):
            expected = module(x)
        with Keyed(random.key(2)), torch.inference_mode():
            drawn = module(x)
        assert_same_bits(drawn.clone(), expected)


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


@pytest.mark.parametrize(
    "function", [F.silu, F.mish, F.gelu, F.softplus, F.rrelu], ids=lambda function: function.__name__
)
def test_operations_that_draw_nothing_have_the_same_bits_under_keyed(function):
    """A first step runs under `Keyed`; if the loss draws nothing, later steps run without it."""
    x = torch.randn(4096, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), x)
    with Keyed(random.key(0)) as keyed:
        assert_same_bits(torch.autograd.grad(function(x).sum(), x), expected)
    assert keyed.offset == 0
