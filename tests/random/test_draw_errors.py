"""Errors for wrong arguments name the function, the argument and its value."""

import math

import pytest
import torch

from ftrain import random
from ftrain.errors import OptionError

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
        (lambda: random.normal(KEY, (2.5,)), r"normal: shape = \(2\.5,\); needs a sequence of sizes"),
        (lambda: random.normal(KEY, None), "normal: shape = None; needs a sequence of sizes"),
        (lambda: random.split(KEY, -1), "split: num is -1, needs a whole number of at least 0"),
        (lambda: random.split(KEY, 1.5), "split: num is 1.5, needs a whole number of at least 0"),
        (lambda: random.normal(0, (3,)), "normal: the key is int; needs a tensor"),
        (lambda: random.dropout(None, torch.ones(2), 0.1), "dropout: the key is None; .* None in an evaluation"),
        (lambda: random.dropout(KEY, 0.1, torch.ones(2)), r"dropout: p = tensor.*; needs a probability"),
        (lambda: random.normal(KEY, (1,), dtype=torch.int64), "normal: dtype = torch.int64"),
        (lambda: random.uniform(KEY, (1,), low=1.0, high=1.0), "uniform: low = 1.0, high = 1.0"),
        (lambda: random.uniform(KEY, (1,), low=math.nan), "uniform: low = nan"),
        (lambda: random.uniform(KEY, (1,), high=math.inf), "uniform: low = 0.0, high = inf"),
        (lambda: random.uniform(KEY, (1,), low=1 + 1e-9, high=1 + 2e-9), "torch.float32 has no value in"),
        (lambda: random.uniform(KEY, (1,), high=1e5, dtype=torch.float16), "torch.float16 has no values above 65504"),
        (lambda: random.uniform(KEY, (1,), low=-1e39, high=0.0), "torch.float32 has no values above"),
        (lambda: random.bernoulli(KEY, 1.5, ()), "bernoulli: p = 1.5"),
        (lambda: random.bernoulli(KEY, math.nan, ()), "bernoulli: p = nan"),
        (lambda: random.bernoulli(KEY, torch.tensor(0.5), ()), "bernoulli: p = 0.5; needs a probability"),
        (lambda: random.dropout(KEY, torch.ones(2), -0.1), "dropout: p = -0.1"),
        (lambda: random.dropout(KEY, torch.ones(2, dtype=torch.int64), 0.1), "dropout: x has dtype torch.int64"),
        (lambda: random.bernoulli(KEY, "0.5", ()), "bernoulli: p = 0.5; needs a probability"),
        (lambda: random.dropout(KEY, [1.0], 0.5), "dropout: x is a list; needs a floating point tensor"),
        (lambda: random.uniform(KEY, (1,), low=None), "uniform: low = None, high = 1.0; needs finite numbers"),
        (lambda: random.randint(KEY, (1,), 3, 3), "randint: low = 3, high = 3"),
        (lambda: random.randint(KEY, (1,), 0, 1e3), "randint: low = 0, high = 1000.0; needs integers"),
        (lambda: random.randint(KEY, (1,), -(2**63) + 1, 2**62), "randint: low = "),
    ],
)
def test_errors_name_the_function_and_the_value(call, message):
    with pytest.raises(OptionError, match=message):
        call()
