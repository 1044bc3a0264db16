"""Draws of equal arguments in one loss, which `torch.compile` may not take for one draw."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ftrain as ft

DRAWS = {
    "normal of a shape": lambda x: torch.normal(0.0, 1.0, x.shape),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "randn_like": torch.randn_like,
    "rrelu": lambda x: functional.rrelu(-x.abs() - 1, training=True),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_each_draw_of_a_split_step_has_numbers_of_its_own(backend, tmp_path):
    def loss(params: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = {name: (draw(x), draw(x)) for name, draw in DRAWS.items()}
        total = sum((params * first * second).mean() for first, second in pairs.values())
        return total, {name: (first - second).detach().abs().max() for name, (first, second) in pairs.items()}

    # In a directory of its own: the cache of torch may have the code of a graph whose draws are merged.
    compiled = ft.compiled(lowering="split", backend=backend, cache_dir=tmp_path)
    step = compiled(ft.train_step(loss, ft.optim.sgd(0.1)))
    _, metrics = step(step.init(torch.ones(1)), torch.randn(16))
    assert [name for name in DRAWS if metrics[name] == 0] == []
