"""The shuffled order: a permutation, a pure function of seed and epoch, and statistically random."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import data, random
from ftrain.data import permutation
from ftrain.errors import OptionError
from tests.exhaustive import exhaustive_rows

HUGE = 10**15


@given(st.integers(1, 3000), st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))
def test_it_is_a_permutation(size, seed, epoch):
    actual = data.shuffled(np.arange(size), size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(actual), np.arange(size))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 4096, 10007])
def test_it_is_a_permutation_at_small_sizes_and_around_powers_of_two(size):
    assert len(set(data.shuffled(range(size), size).flat)) == size


@given(st.data(), st.integers(1, HUGE), st.integers(0, 100), st.integers(0, 100))
def test_indices_one_by_one_give_the_same_as_all_at_once(drawn, size, seed, epoch):
    index = drawn.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    at_once = data.shuffled(index, size, seed=seed, epoch=epoch)
    one_by_one = [int(data.shuffled(i, size, seed=seed, epoch=epoch)) for i in index]
    assert at_once.tolist() == one_by_one
    assert all(0 <= i < size for i in one_by_one)


def test_distinct_indices_stay_distinct_at_a_size_that_no_memory_could_hold():
    index = np.concatenate([np.arange(5000), HUGE - 1 - np.arange(5000)])
    assert len(set(data.shuffled(index, HUGE).tolist())) == 10000


def test_the_result_is_int64_of_the_shape_of_any_array_of_indices():
    actual = data.shuffled([[0, 1], [2, 3]], 4)
    assert actual.shape == (2, 2)
    assert actual.dtype == np.int64
    assert np.array_equal(actual, data.shuffled(torch.arange(4).view(2, 2), 4))
    assert data.shuffled([], 5).shape == (0,)
    assert data.shuffled(0, 1) == 0


@pytest.mark.parametrize(("index", "size"), [([5], 5), ([-1], 5), ([0], 0)])
def test_an_index_out_of_range_is_an_error(index, size):
    with pytest.raises(OptionError, match=rf"{index[0]}.*\[0, {size}\)"):
        data.shuffled(index, size)


@pytest.mark.parametrize("index", [[1.7], [True], ["1"]])
def test_an_index_that_is_not_an_integer_is_an_error(index):
    with pytest.raises(OptionError, match="index has dtype"):
        data.shuffled(index, 5)


def test_the_order_is_that_of_earlier_versions():
    """So that the saved positions of old runs stay valid."""
    assert data.shuffled(range(10), 10, seed=1, epoch=2).tolist() == [5, 6, 7, 0, 2, 9, 1, 8, 3, 4]
    size = permutation.BLOCK + 1
    assert data.shuffled(range(6), size, seed=1, epoch=2).tolist() == [129, 3475, 1997, 3798, 3209, 2839]


@given(st.integers(0, permutation.BLOCK), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_up_to_a_block_it_is_the_permutation_of_a_key(size, low, high):
    actual = permutation.sorted_draws(size, (low, high))
    assert actual.dtype == np.int64
    assert actual.tolist() == random.permutation(random.wrap_key_data((low, high)), size).tolist()


def deviations(counts, expected):
    """Return by how many standard deviations the chi-squared statistic of equally likely cells is off its mean."""
    degrees = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    ("size", "expected"), [(2, 120), (3, 60), (4, 30), *exhaustive_rows([(5, 20), (6, 5), (7, 5)])]
)
def test_all_permutations_are_equally_likely(size, expected):
    orders = list(itertools.permutations(range(size)))
    counts = Counter(
        tuple(data.shuffled(range(size), size, epoch=epoch).tolist()) for epoch in range(expected * len(orders))
    )
    assert abs(deviations(np.array([counts[actual] for actual in orders]), expected)) < 5


@pytest.mark.parametrize("size", [8, 9, 13, 24, 64])
def test_every_place_and_every_pair_of_neighbours_is_equally_likely(size):
    epochs = 4 * size
    actual = np.stack([data.shuffled(range(size), size, epoch=epoch) for epoch in range(epochs)])
    counts, pairs = np.zeros((size, size)), np.zeros((size, size))
    for position in range(size):
        np.add.at(counts, (position, actual[:, position]), 1)
        np.add.at(pairs, (actual[:, position - 1], actual[:, position]), position > 0)
    assert abs(deviations(counts, epochs / size)) < 5
    assert abs(deviations(pairs[~np.eye(size, dtype=bool)], epochs / size)) < 5


@pytest.mark.parametrize(
    "size", [permutation.BLOCK - 1, permutation.BLOCK, permutation.BLOCK + 1, 2 * permutation.BLOCK]
)
def test_bins_of_places_and_of_neighbours_are_equally_likely_on_both_sides_of_a_block(size):
    bins, epochs = 16, 40
    counts, pairs = np.zeros((bins, bins)), np.zeros((bins, bins))
    for epoch in range(epochs):
        bin_of = data.shuffled(np.arange(size), size, epoch=epoch) * bins // size
        np.add.at(counts, (np.arange(size) * bins // size, bin_of), 1)
        np.add.at(pairs, (bin_of[:-1], bin_of[1:]), 1)
    assert abs(deviations(pairs, pairs.sum() / bins**2)) < 5
    # The sums of rows and columns are fixed, which makes this deviation a little smaller.
    assert abs(deviations(counts, counts.sum() / bins**2)) < 5


@pytest.mark.parametrize("size", [5, 9, 16, 25, 49])
def test_odd_and_even_permutations(size):
    def is_odd(order):
        return sum(a > b for a, b in itertools.combinations(order, 2)) % 2

    odd = sum(is_odd(data.shuffled(range(size), size, epoch=epoch).tolist()) for epoch in range(200))
    assert 60 < odd < 140


@pytest.mark.parametrize("size", [1000, 10**9])
def test_where_one_index_goes_is_uniform_over_epochs(size):
    bins, expected = 20, 50
    actual = np.array([int(data.shuffled(7, size, epoch=epoch)) for epoch in range(bins * expected)])
    counts = np.bincount(actual * bins // size, minlength=bins)
    assert deviations(counts, expected) < 5


def test_neighbours_in_the_order_have_nothing_to_do_with_each_other():
    size = 20000
    order = data.shuffled(np.arange(size), size)
    other_epoch = data.shuffled(np.arange(size), size, epoch=1)
    other_seed = data.shuffled(np.arange(size), size, seed=1)
    pairs = [(order[1:], order[:-1]), (order[2:], order[:-2]), (order, np.arange(size))]
    for a, b in [*pairs, (order, other_epoch), (order, other_seed)]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / size**0.5
    steps = np.diff(order)
    assert len(np.unique(steps)) > size / 2
    assert (order == np.arange(size)).sum() < 10
    assert (order == other_epoch).sum() < 10
