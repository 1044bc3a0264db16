"""Ranks that make different steps, or start from states of different steps, are told so in the first one."""

import dataclasses

import pytest
import torch

import ftrain as ft
from ftrain.errors import StructureError
from tests.parallel import models
from tests.parallel.ranks import run


def adamw(**options):
    return {"optimizer": ft.optim.adamw(1e-2, **options)}


def nested(b2):
    parts = {"all": ft.optim.lookahead(ft.optim.chain(ft.optim.centralize(), ft.optim.adamw(1e-2, b2=b2)))}
    return {"optimizer": ft.optim.adjustable(ft.optim.partition(parts, {"all": ["*"]}))}


@ft.wrapper
def quiet(share):
    """A wrapper that does nothing, and does not print its option."""
    return ft.Wrapper("quiet", "quiet", grad=ft.OnGrad(lambda grad: grad))


DIFFERENT = {
    "update  adamw(constant(0.01), weight_decay=0.1)": lambda rank: adamw(weight_decay=0.1 * (rank + 1)),
    "adamw with b2=0.9": lambda rank: adamw(b2=0.9 + 0.09 * rank),
    "the optimizer with all/b2=0.9": lambda rank: nested(0.9 + 0.09 * rank),
    "quiet with share=0.5": lambda rank: {"wrapper": quiet(0.5 + rank)},
}
"""What the first rank has -> what it makes its step of, by rank."""


def test_options_that_do_not_print_are_compared_too():
    def rank(number):
        for text, options in DIFFERENT.items():
            mine = {"wrapper": ft.clip(1.0), **options(number)}
            step = models.step_of(mine.pop("wrapper"), ft.sharded(ft.parallel.mesh(), 0), **mine)
            with pytest.raises(StructureError) as caught:
                step(step.init(), next(models.batches()))
            assert f"sharded: the ranks make different steps: rank 0 has {text}" in str(caught.value)

    run(2, rank)


def test_states_of_different_steps_are_refused():
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        state = dataclasses.replace(step.init(), step=torch.tensor(number))
        with pytest.raises(StructureError, match="rank 0 has a state of step 0, and rank 1 has a state of step 1"):
            step(state, next(models.batches()))

    run(2, rank)
