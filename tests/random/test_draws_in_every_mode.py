"""Draws have the same bits eager, traced, compiled, under vmap, recomputed, on a GPU and in every shape."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from ftrain import random
from ftrain.random.torch_ops import Keyed
from tests.random.draws import DRAWS, all_draws, assert_same_bits


def test_traced_draws_have_the_bits_of_eager_ones():
    key, x = random.key(11), torch.linspace(-1, 1, 10)
    traced = make_fx(all_draws, tracing_mode="fake")(random.key(0), x)
    assert_same_bits(traced(key, x), all_draws(key, x))


def test_compiled_draws_have_the_bits_of_eager_ones():
    # Compiling takes a third of a second per draw, so this has only the draws that no test below compiles.
    def some_draws(key):
        uniform = random.uniform(key, (2, 3), low=-0.3, high=0.8)
        return random.split(key, 3), uniform, random.exponential(key, (5,)), random.randint(key, (5,), -3, 11)

    key = random.key(11)
    assert_same_bits(torch.compile(some_draws, backend="aot_eager", fullgraph=True)(key), some_draws(key))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # From the import of Inductor.
def test_draws_that_inductor_compiles_have_the_bits_of_eager_ones():
    def draw(key, x):
        return random.dropout(key, x, 0.4), random.normal(random.fold_in(key, 1), (33,))

    key, x = random.key(12), torch.linspace(-1, 1, 301)
    assert_same_bits(torch.compile(draw, fullgraph=True)(key, x), draw(key, x))


def test_dynamic_shapes():
    compiled = torch.compile(random.dropout, backend="aot_eager", fullgraph=True, dynamic=True)
    for num in (3, 8, 33):
        x = torch.ones(num)
        assert_same_bits(compiled(random.key(1), x, 0.5), random.dropout(random.key(1), x, 0.5))


def test_vmap_over_keys_equals_a_loop():
    keys, x = random.split(random.key(13), 4), torch.linspace(-1, 1, 10)
    draws_of_keys = [all_draws(key, x) for key in keys]
    expected = tuple(torch.stack(draws) for draws in zip(*draws_of_keys, strict=True))
    assert_same_bits(torch.func.vmap(all_draws, in_dims=(0, None))(keys, x), expected)


def test_recomputed_draws_are_the_same():
    def block(x, key):
        return random.dropout(key, x.sin(), 0.5).exp()

    def gradient(function):
        x = torch.linspace(-1, 1, 32, requires_grad=True)
        return torch.autograd.grad(function(x, random.key(5)).sum(), x)

    recomputing = functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    assert_same_bits(gradient(recomputing), gradient(block))


@given(sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_a_small_draw_is_the_beginning_of_a_large_one(sizes):
    small, large = sorted(sizes)
    key = random.key(8)
    for draw in DRAWS:
        assert_same_bits(draw(key, (small,)), draw(key, (large,))[:small])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
def test_a_draw_of_any_shape_is_that_of_a_vector_in_row_major_order(shape):
    key, size = random.key(9), math.prod(shape)
    for draw in DRAWS:
        assert_same_bits(draw(key, shape), draw(key, (size,)).reshape(shape))
    assert_same_bits(
        random.dropout(key, torch.ones(shape), 0.5).reshape(-1), random.dropout(key, torch.ones(size), 0.5)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: compares its bits with the CPU's")
def test_gpu_draws_the_same_bits():
    key, x = random.key(11), torch.linspace(-1, 1, 10)
    on_gpu = all_draws(key.cuda(), x.cuda())
    assert all(tensor.is_cuda for tensor in on_gpu)
    assert_same_bits([tensor.cpu() for tensor in on_gpu], list(all_draws(key, x)))
    with Keyed(key):
        drawn = F.dropout(x.cuda(), 0.5)
    # Equal, but not the same bits: on a CPU torch multiplies by 0, so that a dropped negative number is -0.0.
    with Keyed(key):
        assert torch.equal(drawn.cpu(), F.dropout(x, 0.5))


def test_torchs_generator_is_left_unchanged():
    before = torch.get_rng_state()
    all_draws(random.key(0), torch.ones(10))
    with Keyed(random.key(0)):
        F.dropout(torch.randn(8), 0.5)
    assert_same_bits(torch.get_rng_state(), before)
