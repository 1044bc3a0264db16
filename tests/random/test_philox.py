"""The generator: published test vectors, tensors against plain integers, and counters of 64 bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import random
from ftrain.random import keys, philox

words = st.integers(0, 2**32 - 1)

# (counter, key, result) of philox4x32-10 from the file kat_vectors of Random123 (Salmon et al. 2011).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def parse_words(text):
    """Return the integers of hexadecimal words."""
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, result):
    counter, key, result = parse_words(counter), parse_words(key), parse_words(result)
    assert philox.philox_host(key, counter) == result
    assert tuple(map(int, philox.philox(torch.tensor(key), torch.tensor(counter).unbind()))) == result


@given(key=st.tuples(words, words), counter=st.tuples(words, words, words, words))
def test_philox_on_tensors_equals_plain_integers(key, counter):
    block = philox.philox(torch.tensor(key), torch.tensor(counter).unbind())
    assert tuple(map(int, block)) == philox.philox_host(key, counter)


def test_a_counter_beyond_32_bits_has_its_upper_bits_in_the_second_word():
    index = torch.tensor([0, 2**32 - 1, 2**32, 2**32 + 3, 2**40 + 5])
    blocks = torch.stack(keys._blocks(random.key(5), index, 0), -1).tolist()
    for i, block in zip(index.tolist(), blocks, strict=True):
        assert tuple(block) == philox.philox_host((5, 0), (i % 2**32, i >> 32, 0, 0))
