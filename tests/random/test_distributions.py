"""The distribution and the range of every draw, dropout included. Keys are fixed, so a test passes always or never."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import random
from ftrain.random import keys
from tests.random.draws import FLOATS, assert_same_bits, fixed_word

NUM = 1 << 16


def test_the_values_of_each_byte_are_equally_frequent():
    words = random.bits(random.key(21), (NUM,))
    assert 0 <= int(words.min()) < int(words.max()) < 2**32
    for shift in (0, 8, 16, 24):
        assert_equally_frequent((words >> shift) & 255, 256)


def assert_equally_frequent(values, num_values):
    """Check integers from 0 on with a chi-squared test, at five standard deviations on both sides."""
    counts = torch.bincount(values, minlength=num_values).double()
    assert counts.numel() == num_values
    expected = values.numel() / num_values
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    # Chi-squared of n degrees of freedom has the mean n and the variance 2n.
    degrees = num_values - 1
    assert abs(chi_squared - degrees) < 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("draw", "mean", "variance", "fourth_moment"),
    [
        (random.uniform, 0.5, 1 / 12, 1 / 80),
        (random.normal, 0.0, 1.0, 3.0),
        (random.exponential, 1.0, 1.0, 9.0),
    ],
)
def test_mean_variance_and_autocorrelation(draw, mean, variance, fourth_moment, dtype):
    drawn = draw(random.key(22), (NUM,), dtype=dtype)
    assert drawn.dtype == dtype
    drawn = drawn.double()
    # A uniform draw of few digits is rounded down, so that its mean is lower by half of the distance of two values.
    rounding = torch.finfo(dtype).eps / (4 if draw is random.uniform else 8)
    assert abs(float(drawn.mean()) - mean) < 4 * math.sqrt(variance / NUM) + rounding
    assert abs(float(drawn.var()) - variance) < 4 * math.sqrt((fourth_moment - variance**2) / NUM) + rounding
    for lag in (1, 2, 4):
        products = (drawn[lag:] - mean) * (drawn[:-lag] - mean)
        assert abs(float(products.mean())) < 4 * variance / math.sqrt(NUM) + rounding


def test_the_tails_of_the_normal_distribution():
    drawn = random.normal(random.key(23), (NUM,), dtype=torch.float64)
    for bound in (0.5, 1.0, 2.0, 3.0):
        p = math.erfc(bound / math.sqrt(2))
        share = float((drawn.abs() > bound).double().mean())
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / NUM)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.99])
def test_bernoulli_compares_the_words_with_its_probability(p):
    drawn = random.bernoulli(random.key(24), p, (NUM,))
    assert drawn.dtype == torch.bool
    assert abs(float(drawn.double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / NUM)
    assert_same_bits(drawn, random.bits(random.key(24), (NUM,)) < round(p * 2**32))


def test_the_integers_of_a_range_are_equally_frequent():
    assert_equally_frequent(random.randint(random.key(25), (NUM,), -3, 5) + 3, 8)
    wide = random.randint(random.key(25), (NUM,), -(2**61), 2**61)
    assert -(2**61) <= int(wide.min()) < -(2**60)
    assert 2**60 < int(wide.max()) < 2**61


def test_every_order_is_drawn():
    orders = torch.stack([random.permutation(key, 3) for key in random.split(random.key(26), 60)])
    assert_same_bits(orders.sort(-1).values, torch.arange(3).expand(60, 3))
    assert len({tuple(order) for order in orders.tolist()}) == 6
    assert random.permutation(random.key(0), 0).shape == (0,)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_uniform_draw_can_be_0_and_not_1(dtype):
    key, digits = random.key(0), keys._DIGITS[dtype]
    with fixed_word(2**32 - 1):
        assert float(random.uniform(key, (), dtype=dtype)) == 1 - 2.0**-digits
    with fixed_word(0):
        assert float(random.uniform(key, (), dtype=dtype)) == 0


def test_a_uniform_draw_in_bfloat16_is_any_multiple_of_1_in_256():
    values = random.uniform(random.key(0), (NUM,), dtype=torch.bfloat16).unique()
    assert_same_bits(values, (torch.arange(256) / 256).bfloat16())


@pytest.mark.parametrize("dtype", FLOATS)
@given(low=st.floats(-50, 50), width=st.floats(0.5, 50))
def test_a_uniform_draw_is_inside_its_range(dtype, low, width):
    high = low + width
    for word in (0, 1, 2**31, 2**32 - 1):
        with fixed_word(word):
            drawn = random.uniform(random.key(0), (), dtype=dtype, low=low, high=high)
        assert drawn.dtype == dtype
        assert low <= drawn.item() < high
        expected = low + (high - low) * word / 2**32
        assert drawn.item() == pytest.approx(expected, rel=0, abs=max(128 * torch.finfo(dtype).eps, 1e-7))


@pytest.mark.parametrize("dtype", FLOATS)
@given(value=st.floats(-60000, 60000))
def test_round_down_gives_the_largest_number_that_is_not_above(dtype, value):
    rounded = keys._round_down(value, dtype)
    tensor = torch.tensor(rounded, dtype=dtype)
    assert float(tensor) == rounded <= value
    assert float(torch.nextafter(tensor, torch.tensor(math.inf, dtype=dtype))) > value


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_bits_give_finite_draws(dtype):
    for word in (0, 2**32 - 1):
        with fixed_word(word):
            normal = random.normal(random.key(0), (4,), dtype=dtype)
            exponential = random.exponential(random.key(0), (4,), dtype=dtype)
        assert normal.isfinite().all()
        assert exponential.isfinite().all()
        assert (exponential > 0).all()


def test_bernoulli_with_probability_0_and_1():
    assert random.bernoulli(random.key(0), 1.0, (NUM,)).all()
    assert not random.bernoulli(random.key(0), 0.0, (NUM,)).any()
    with fixed_word(2**32 - 1):
        assert random.bernoulli(random.key(0), 1, ())
    with fixed_word(0):
        assert not random.bernoulli(random.key(0), 0, ())


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_and_its_gradient_scale_the_elements_that_are_kept(dtype):
    x = torch.linspace(1, 2, 64, dtype=dtype, requires_grad=True)
    y = random.dropout(random.key(31), x, 0.25)
    keep = random.bernoulli(random.key(31), 0.75, (64,))
    assert_same_bits(y.detach(), torch.where(keep, x.detach() * (1 / 0.75), 0.0))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert_same_bits(grad, keep.to(dtype) * (1 / 0.75))
    assert 0 < int(keep.sum()) < 64  # Some are dropped, and some are kept.


def test_dropout_with_probability_0_and_1():
    x = torch.tensor([1.0, torch.finfo(torch.float32).max], requires_grad=True)
    assert random.dropout(random.key(0), x, 0.0) is x
    dropped = random.dropout(random.key(0), x, 1.0)
    assert_same_bits(dropped.detach(), torch.zeros(2))
    assert_same_bits(torch.autograd.grad(dropped.sum(), x)[0], torch.zeros(2))


def test_dropout_of_an_element_that_overflows_is_not_nan():
    # Scaled by 2 it is infinite, and infinity times 0 would be NaN.
    x = torch.full((64,), torch.finfo(torch.float32).max, requires_grad=True)
    y = random.dropout(random.key(0), x, 0.5)
    assert set(y.tolist()) == {0.0, math.inf}
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_dropout_takes_a_key_on_another_device():
    assert random.dropout(random.key(0), torch.ones(3, device="meta"), 0.5).device.type == "meta"
