"""`to_module` copies a state back into a module."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import StructureError
from tests.step.modules import Net, all_cases, make_case, make_step, train
from tests.step.states import assert_same_bits, assert_unchanged, snapshot, tensors_of


def trained(name):
    """Return a module, a step of it, and the state after some steps."""
    module, make_batch, criterion = make_case(name)
    step = make_step(module, criterion)
    return module, step, train(step, make_batch)


@all_cases
def test_to_module_writes_the_state_into_the_parameters_and_buffers(name):
    module, _, state = trained(name)
    params = list(module.parameters())
    assert ft.to_module(module, state) is module
    assert all(param is old for param, old in zip(module.parameters(), params, strict=True))
    assert_same_bits(tensors_of(module), {**state.params, **state.buffers})


@all_cases
def test_to_module_takes_a_module_that_torch_compiled(name):
    module, _, state = trained(name)
    compiled = torch.compile(module)
    assert ft.to_module(compiled, state) is compiled
    assert_same_bits(tensors_of(module), {**state.params, **state.buffers})


@all_cases
def test_a_module_with_the_weights_of_a_state_starts_with_them(name):
    module, step, state = trained(name)
    ft.to_module(module, state)
    assert_same_bits(step.init().params, state.params)


@all_cases
def test_further_training_does_not_change_the_module(name):
    module, step, state = trained(name)
    _, make_batch, _ = make_case(name)
    ft.to_module(module, state)
    before = snapshot(module)
    ft.donated(step)(state, make_batch())
    assert_unchanged(module, before)


def test_to_module_writes_frozen_parameters_too():
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion, trainable=["norm.*"])
    state, _ = step(step.init(), make_batch())
    target = ft.to_module(make_case("net")[0], state)
    assert torch.equal(target.embed.weight, module.embed.weight)
    assert torch.equal(target.norm.weight, state.params["norm.weight"])


def test_to_module_of_the_averages():
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion, ft.ema(0.5))
    state, _ = step(step.init(), make_batch())
    target = ft.to_module(make_case("net")[0], ft.averaged(state))
    expected = (module.norm.weight + state.params["norm.weight"]) / 2
    torch.testing.assert_close(target.norm.weight.detach(), expected.detach())


def test_to_module_casts_to_the_modules_dtype():
    module, make_batch, criterion = make_case("net")
    state = train(make_step(module, criterion), make_batch)
    target = ft.to_module(Net().float(), state)
    assert target.norm.weight.dtype == torch.float32
    torch.testing.assert_close(target.norm.weight.double(), state.params["norm.weight"], rtol=1e-6, atol=1e-6)


def test_a_module_of_other_shapes_is_refused_and_not_changed():
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion)
    state, _ = step(step.init(), make_batch())
    target = nn.ModuleDict({"embed": nn.Embedding(7, 4), "norm": nn.BatchNorm1d(5)}).double()
    before = snapshot(target)
    with pytest.raises(StructureError, match=r"norm\.weight: found \[4\], needs \[5\]"):
        ft.to_module(target, state)
    assert_unchanged(target, before)
