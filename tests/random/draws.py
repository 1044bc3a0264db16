"""Draws that several files of tests make, and a comparison of their bits."""

import functools
from unittest import mock

import torch

from ftrain import random
from ftrain.random import keys

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The dtypes in which `normal` has the same bits in every mode. In float64 they depend on the compiler's log and cos.
NORMAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

DRAWS = [
    random.bits,
    random.uniform,
    random.normal,
    random.exponential,
    functools.partial(random.uniform, dtype=torch.float64),
    functools.partial(random.normal, dtype=torch.float64),
    functools.partial(random.exponential, dtype=torch.float64),
    functools.partial(random.randint, low=0, high=99),
    lambda key, shape: random.bernoulli(key, 0.5, shape),
]
"""Functions ``(key, shape) -> tensor``."""


def all_draws(key, x):
    """Return a result of each drawing function of `ftrain.random`; `x` is the input of dropout."""
    return (
        random.bits(key, (3, 5)),
        random.split(key, 3),
        random.fold_in(key, -7),
        random.fold_in(key, key[0]),
        *(random.uniform(key, (7,), dtype=dtype) for dtype in FLOATS),
        random.uniform(key, (2, 3), low=-0.3, high=0.8),
        *(random.normal(key, (9,), dtype=dtype) for dtype in NORMAL_DTYPES),
        random.exponential(key, (5,)),
        random.bernoulli(key, 0.3, (11,)),
        random.dropout(key, x, 0.4),
        random.randint(key, (5,), -3, 11),
        random.permutation(key, 6),
    )


def fixed_word(word):
    """Make the generator return `word` for every word of every block."""
    return mock.patch.object(keys, "philox", lambda key, counter: (torch.full_like(counter[0], word),) * 4)


def assert_same_bits(actual, expected):
    """Check that two trees of tensors have the same bits, also of NaN and -0.0, the same dtypes and shapes."""
    leaves, expected_leaves = (torch.utils._pytree.tree_leaves(tree) for tree in (actual, expected))
    assert len(leaves) == len(expected_leaves)
    for a, b in zip(leaves, expected_leaves, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
