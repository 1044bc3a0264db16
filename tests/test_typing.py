"""What the types of the package say to users who run no type checker; the others see `typing_cases`."""

import pytest

import ftrain as ft
from ftrain.errors import ComposeError


@pytest.mark.parametrize(
    "step", [lambda state, batch: (state, {}), ft.train_step(lambda p, b: p["w"], ft.optim.sgd(1))]
)
def test_a_step_and_a_state_that_are_swapped(step):
    with pytest.raises(ComposeError, match=r"fit: the step and the state are swapped; needs fit\(step, state, data\)"):
        ft.fit({"w": 0}, step, [1])
