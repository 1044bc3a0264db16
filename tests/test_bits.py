"""The comparison of bits that other tests use finds every difference."""

import math

import pytest
import torch

from tests.bits import assert_same_bits

EXPECTED = {"a": torch.tensor([0.0, math.nan]), "b": [torch.ones(2, dtype=torch.bfloat16), 1.0]}
DIFFERENT = {
    "a zero with a sign": {**EXPECTED, "a": torch.tensor([-0.0, math.nan])},
    "a leaf less": {"a": EXPECTED["a"], "b": EXPECTED["b"][:1]},
    "no leaf": {},
    "another container": {**EXPECTED, "b": tuple(EXPECTED["b"])},
    "another shape": {**EXPECTED, "a": EXPECTED["a"][None]},
    "another dtype of the same bits": {**EXPECTED, "a": EXPECTED["a"].view(torch.int32)},
    "a bit": {**EXPECTED, "b": [torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16), 1.0]},
    "another class of number": {**EXPECTED, "b": [EXPECTED["b"][0], 1]},
}


def test_trees_of_the_same_bits_are_equal_whatever_their_strides():
    assert_same_bits({"b": [torch.ones(4, dtype=torch.bfloat16)[::2], 1.0], "a": EXPECTED["a"].clone()}, EXPECTED)


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_difference_is_an_error(name):
    with pytest.raises(AssertionError):
        assert_same_bits(DIFFERENT[name], EXPECTED)
