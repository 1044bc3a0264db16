"""Errors at run time for wrong calls. `typing_cases.py` has those that a type checker reports."""

import pytest

import ftrain as ft
from ftrain.errors import ComposeError


@pytest.mark.parametrize(
    "step", [lambda state, batch: (state, {}), ft.train_step(lambda p, b: p["w"], ft.optim.sgd(1))]
)
def test_a_step_and_a_state_that_are_swapped_are_refused(step):
    with pytest.raises(ComposeError, match=r"fit: the step and the state are swapped; needs fit\(step, state, data\)"):
        ft.fit({"w": 0}, step, [1])
