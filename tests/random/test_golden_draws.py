"""Golden bits: a change of these changes the result of every run."""

import pytest
import torch

from ftrain import random

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
        ["0x1.5555560000000p+0", "0x1.5555560000000p+0", "0x0.0p+0", *["0x1.5555560000000p+0"] * 3],
    ),
    "randint": (lambda key: random.randint(key, (5,), -50, 50), [17, 27, 47, -32, -20]),
    "permutation": (lambda key: random.permutation(key, 7), [2, 4, 0, 6, 5, 3, 1]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_draws_have_the_golden_bits(name):
    draw, expected = GOLDEN[name]
    drawn = draw(random.key(2024)).flatten().tolist()
    assert [number.hex() if isinstance(number, float) else number for number in drawn] == expected


def test_golden_keys_and_seeds_of_torchs_operations():
    assert random.stock_key_data((2024, 0)) == (1937008779, 1801415545)
    assert random.seed_of((2024, 0)) == 3868510427109012549


def test_golden_normal_draws_in_float64():
    # Their last bits depend on how the platform computes log and cos.
    drawn = random.normal(random.key(2024), (2,), dtype=torch.float64)
    expected = torch.tensor([0.999983317211061, -0.0970705468542187], dtype=torch.float64)
    torch.testing.assert_close(drawn, expected, rtol=1e-14, atol=0)
