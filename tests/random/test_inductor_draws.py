"""The draws of graphs that Inductor compiles, with its numbers in place of those of the key."""

import pytest
import torch

from ftrain import random
from ftrain.errors import OptionError
from ftrain.random import inductor


@pytest.fixture
def drawn(monkeypatch):
    """Replace the operation of Inductor, which eager mode lacks, by numbers up to the largest below 1."""
    numbers = torch.tensor([0.0, 0.3, 0.5, 0.9979, 1 - 2.0**-12, 1 - 2.0**-24])
    monkeypatch.setattr(inductor, "inductor_random", lambda shape, seed, distribution, start: numbers.clone())
    return numbers


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_a_uniform_draw_is_never_1(drawn, dtype, digits):
    with inductor.Fused(random.key(0)):
        values = [torch.rand(6, dtype=dtype), torch.rand_like(torch.ones(6, dtype=dtype))]
    for value in values:
        assert value.dtype == dtype
        assert value.max() < 1
        assert torch.equal(value.double(), (drawn.double() * 2**digits).floor() / 2**digits)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_a_dtype_that_is_not_floating_is_refused_as_in_eager_mode(drawn, draw):
    with inductor.Fused(random.key(0)), pytest.raises(OptionError, match=r"dtype = torch\.complex64; needs one of"):
        draw(6, dtype=torch.complex64)
