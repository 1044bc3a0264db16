"""When the loss of a batch counts as that of its pieces."""

import pytest
import torch

import ftrain as ft
from ftrain.step.microbatch import combined, is_combined
from ftrain.types import Loss

NAN = float("nan")


def mean(value, weight=1.0):
    return ft.Mean(torch.tensor(value * weight), torch.tensor(weight))


@pytest.mark.parametrize(
    ("whole", "pieces", "dtype", "same"),
    [
        (mean(2.0), [mean(1.0), mean(3.0)], torch.float32, True),
        (mean(2.5), [mean(1.0), mean(3.0, 3.0)], torch.float32, True),
        (mean(4.0), [mean(1.0), mean(3.0)], torch.float32, False),
        (mean(2.01), [mean(1.0), mean(3.0)], torch.float32, False),
        (mean(2.01), [mean(1.0), mean(3.0)], torch.bfloat16, True),
        # What cancels is small beside its parts.
        (mean(1e-4), [mean(-1.0), mean(1.0)], torch.float32, True),
        # The mean of no token is NaN, and so is what is made of it.
        (mean(2.0), [mean(NAN), mean(3.0)], torch.float32, False),
        (mean(NAN), [mean(NAN), mean(3.0)], torch.float32, True),
    ],
)
def test_is_combined(whole, pieces, dtype, same):
    loss = Loss(lambda *args: None, "loss")
    assert is_combined(loss, {"w": torch.ones(2, dtype=dtype)}, whole, pieces) is same


def test_combined_is_weighted():
    assert combined([mean(1.0), mean(3.0, 3.0)]) == 2.5
