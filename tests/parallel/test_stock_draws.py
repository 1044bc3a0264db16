"""Stock random operations that first draw in a later step, when ranks no longer watch each operation."""

import logging
from types import SimpleNamespace

import pytest
import torch

import ftrain as ft
from ftrain.parallel.stock_draws import StockDraws


@pytest.mark.parametrize("size", [1, 2])
def test_a_draw_that_comes_in_a_later_step_is_noticed(size, caplog):
    """One rank runs the step again, from its key. Several ranks warn, and draw from the key in the next steps."""
    state = ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(0.1)).init({"w": torch.ones(1)})
    draws = StockDraws(SimpleNamespace(size=size, sum=lambda count: size * count))

    def run(function):
        torch.manual_seed(0)
        return draws.run(function, state)[0]

    with caplog.at_level(logging.WARNING, "ftrain"):
        assert run(lambda: 3) == run(lambda: 3) == 3
        unexpected, later = run(lambda: torch.rand(2)), run(lambda: torch.rand(2))
    torch.manual_seed(0)
    stock = torch.rand(2)
    assert not torch.equal(later, stock)
    assert torch.equal(unexpected, later if size == 1 else stock)
    assert ("drew from torch's generator in step 0" in caplog.text) == (size > 1)
