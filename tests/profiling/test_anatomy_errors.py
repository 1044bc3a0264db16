"""Anatomy: steps that cannot run on fake tensors, and wrong arguments, are errors."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import optim
from ftrain.errors import ComposeError, StructureError, TraceError
from tests.profiling import problem


def test_anatomy_refuses_functions_and_states_of_other_steps():
    step, batch = problem.make(), problem.batch(4)
    with pytest.raises(ComposeError, match="anatomy: the step is function; needs a Step"):
        ft.anatomy(lambda state, batch: (state, {}), step.init(), batch)
    without_module = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"anatomy: loss has no module; pass a state"):
        ft.anatomy(without_module, None, batch)
    with pytest.raises(StructureError):
        ft.anatomy(step, without_module.init({"w": torch.ones(1)}), batch)


def test_a_nested_tensor_cannot_be_predicted():
    rows = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    loss = ft.from_module(nn.Linear(4, 4), lambda model, batch: model(batch).values().square().mean())
    step = ft.train_step(loss, optim.sgd(0.1))
    with pytest.raises(TraceError, match=r"^hints: runs the step on fake tensors, and a nested tensor has none"):
        ft.hints(step, step.init(), rows)


def test_a_step_that_reads_a_value_cannot_be_predicted():
    def loss(params, batch):
        total = (params["w"] * batch).sum()
        return total * 2 if bool(total.detach() > 0) else total

    step = ft.train_step(loss, optim.sgd(0.1))
    for function in (ft.anatomy, ft.hints, ft.tune):
        text = rf"^{function.__name__}: runs the step on fake tensors, which have no values, and loss reads a value \("
        with pytest.raises(TraceError, match=text):
            function(step, step.init({"w": torch.ones(3)}), torch.ones(3))


def test_a_step_with_an_operation_without_a_fake_implementation_cannot_be_predicted():
    library = torch.library.Library("ftrain_test", "FRAGMENT")
    library.define("only_real(Tensor x) -> Tensor")
    library.impl("only_real", torch.clone, "CPU")

    def loss(params, batch):
        return (torch.ops.ftrain_test.only_real(batch) * params["w"]).sum()

    step = ft.train_step(loss, optim.sgd(0.1))
    state = step.init({"w": torch.ones(3)})
    step(state, torch.ones(3))
    with pytest.raises(TraceError, match=r"anatomy: runs the step on fake tensors.* loss fails: .*only_real"):
        ft.anatomy(step, state, torch.ones(3))
