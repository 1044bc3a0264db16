"""In the first step, different steps or different states on ranks are an error that names the difference."""

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
    return ft.Wrapper("quiet", "quiet", grad=ft.OnGrad(lambda grad: grad, by_element=True))


DIFFERENT = {
    "update  adamw(constant(0.01), weight_decay=0.1)": lambda rank: adamw(weight_decay=0.1 * (rank + 1)),
    "adamw with b2=0.9": lambda rank: adamw(b2=0.9 + 0.09 * rank),
    "the optimizer with all/b2=0.9": lambda rank: nested(0.9 + 0.09 * rank),
    "quiet with share=0.5": lambda rank: {"wrapper": quiet(0.5 + rank)},
}
"""The text of the first rank's step -> the options of the step, by rank."""


def test_steps_of_different_options_are_refused_also_of_those_that_do_not_print():
    def rank(number):
        for text, options in DIFFERENT.items():
            named = {"wrapper": ft.clip(1.0), **options(number)}
            step = models.step_of(named.pop("wrapper"), ft.sharded(ft.parallel.mesh(), 0), **named)
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


def test_states_of_different_seeds_are_refused():
    """Ranks would draw different dropout, and a run that resumes would have the key of one of them."""

    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        with pytest.raises(StructureError, match=r"random key \(0, 0\) in its state, and rank 1 has .*the same seed"):
            step(step.init(seed=number), next(models.batches()))

    run(2, rank)


def of_other_dtype(rank):
    return torch.nn.Linear(5, 3, dtype=torch.float64 if rank else torch.float32)


def of_other_width(rank):
    return torch.nn.Linear(5, 3 - rank)


@pytest.mark.parametrize("make", [of_other_dtype, of_other_width])
def test_models_of_different_shapes_or_dtypes_are_refused_at_init(make):
    """Gloo would end the program without an error when a rank sends more than another one expects."""

    def rank(number):
        loss = ft.from_module(make(number), lambda model, batch: model(batch).mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh()))
        with pytest.raises(StructureError, match=r"different tensors: rank 0 has params.*, and rank 1 has params"):
            step.init()

    run(2, rank)


def rows_step(rank, batches):
    step = models.step_of(ft.sharded(ft.parallel.mesh(), batches="rows"))
    step(step.init(), batches[rank])


def test_ranks_that_read_the_same_rows_are_warned_once():
    first, second = models.batches(2)
    with pytest.warns(UserWarning, match="ranks 0 and 2 have read the same first batch") as caught:
        run(3, lambda rank: rows_step(rank, [first, second, first]))
    assert len(caught) == 1


def test_a_divided_state_is_refused_by_a_step_without_ranks():
    def rank(_):
        state = models.step_of(ft.sharded(ft.parallel.mesh())).init()
        with pytest.raises(StructureError, match=r"has no ft.sharded\(mesh\): add it to the step"):
            models.step_of()(state, next(models.batches()))

    run(2, rank)


def test_a_module_that_torch_has_divided_is_refused_at_init():
    def rank(_):
        mesh, module = ft.parallel.mesh(), torch.nn.Linear(5, 3)
        torch.distributed.fsdp.fully_shard(module, mesh=mesh["shard"])
        step = ft.compose(ft.train_step(ft.from_module(module, models.loss), ft.optim.sgd(0.1)), ft.sharded(mesh))
        with pytest.raises(
            StructureError, match=r"is a DTensor, as after fully_shard or parallelize_module; pass the module"
        ):
            step.init()

    run(2, rank)
