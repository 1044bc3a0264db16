"""Keys: their seeds, the same keys on the host, and children that draw different numbers."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import random
from ftrain.errors import ComposeError
from tests.random.draws import assert_same_bits

integers_of_64_bits = st.integers(-(2**63), 2**64 - 1)


@given(seed=integers_of_64_bits)
def test_a_key_holds_the_bits_of_its_seed(seed):
    key = random.key(seed)
    low, high = random.key_data(key)
    assert key.dtype == torch.int64
    assert (high << 32 | low) == seed % 2**64
    assert_same_bits(random.wrap_key_data((low, high)), key)


@pytest.mark.parametrize("seed", [0.5, None, "0", random.key(0), torch.tensor(0.5)])
def test_a_seed_must_be_an_integer(seed):
    with pytest.raises(ComposeError, match=f"key: seed is {re.escape(repr(seed))}, needs a whole number"):
        random.key(seed)


@given(seed=integers_of_64_bits, data=integers_of_64_bits)
def test_fold_in_is_the_same_on_the_host(seed, data):
    key = random.key(seed)
    expected = random.fold_in_key_data(random.key_data(key), data)
    assert random.key_data(random.fold_in(key, data)) == expected
    assert random.step_key_data(random.key_data(key), data) == expected


@given(data=integers_of_64_bits)
def test_fold_in_of_a_tensor_is_that_of_each_integer_in_it(data):
    # An int64 tensor holds an integer from 2**63 on as its two's complement.
    integer = torch.tensor(data - 2**64 if data >= 2**63 else data)
    key = random.key(6)
    expected = random.fold_in(key, data)
    assert_same_bits(random.fold_in(key, integer), expected)
    assert_same_bits(random.fold_in(key, integer.expand(2, 1)), expected.expand(2, 1, 2))


def test_bits_split_and_fold_in_give_different_words():
    key, num = random.key(3), 4096
    drawn = random.bits(key, (4 * num,)).reshape(-1, 4)[:, :2]
    folded = random.fold_in(key, torch.arange(num))
    pairs = torch.cat([drawn, random.split(key, num), folded]).tolist()
    assert len({tuple(pair) for pair in pairs}) == 3 * num


def test_children_draw_different_numbers():
    children = random.split(random.key(4), 64)
    # Compared in pairs: two of 4,096 words of 32 bits may be equal by chance.
    pairs = torch.func.vmap(lambda key: random.bits(key, (64,)))(children).reshape(-1, 2).tolist()
    assert len({tuple(pair) for pair in pairs}) == len(pairs)
