"""Rematerialisation of losses and modules without blocks, or with wrong ones."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from tests.faults.problem import batch, failing, make, params, squares


def of(module):
    return ft.from_module(module, lambda model, batch: model(batch).sum())


def test_a_module_without_repeated_children_is_an_error():
    with failing(OptionError, "remat", "Linear", "no repeated children", "its lists: none", "blocks=[...]"):
        make(of(nn.Linear(3, 3)), ft.remat())


def test_a_sequential_module_without_repeated_children_is_an_error():
    with failing(OptionError, "remat", "no repeated children", "its lists: itself", "blocks=[...]"):
        make(of(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), ft.remat())


def test_the_error_names_a_list_without_repeated_children():
    module = nn.Module()
    module.stages = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)])
    with failing(OptionError, "remat", "no repeated children", "stages"):
        make(of(module), ft.remat())


@pytest.mark.parametrize("block", ["encoder.0", "Linear", nn.Conv2d])
def test_a_block_that_the_module_does_not_have_is_an_error(block):
    name = block if isinstance(block, str) else block.__name__
    with failing(OptionError, "remat", "Sequential", name, "Linear, Sequential"):
        make(of(nn.Sequential(nn.Linear(3, 3))), ft.remat(blocks=["0", block]))


@pytest.mark.parametrize("blocks", ["0", nn.Linear])
def test_blocks_that_are_not_a_list_are_an_error(blocks):
    # The characters of a str would be the names of blocks.
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    with failing(OptionError, "remat", "blocks", repr(blocks), "list"):
        make(of(module), ft.remat(blocks=blocks))


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
def test_a_pure_loss_that_runs_no_block_is_an_error(wrappers):
    step = make(squares, ft.remat(), *wrappers)
    with failing(ComposeError, "remat", "squares ran no block", "ft.block(function)"):
        step(step.init(params()), batch())


def test_blocks_of_a_loss_without_a_module_are_an_error():
    with failing(OptionError, "remat", "squares", "blocks", "ft.block"):
        make(squares, ft.remat(blocks=["layers.0"]))


def test_a_pure_loss_with_a_block_has_the_gradients_of_one_without_remat():
    @ft.block
    def inner(w, x):
        return torch.tanh(x @ w)

    def loss(params, batch):
        return inner(params["w"], batch["x"]).sum() + params["b"]

    plain, wrapped = make(loss), make(loss, ft.remat())
    actual, expected = (step(step.init(params()), batch())[0].params for step in (wrapped, plain))
    assert torch.equal(actual["w"], expected["w"])
