"""`partial` and `rename` load a state into that of a step that trains other parameters."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import StructureError
from tests.training.interrupted_runs import make


def product(params, batch):
    return (params["a"] * params["b"] * batch).sum()


def ones():
    return {"a": torch.ones(2), "b": torch.ones(2)}


def training_both():
    return ft.train_step(product, ft.optim.adam(0.1))


def training_only_b():
    return ft.train_step(product, ft.optim.adam(0.1), trainable=["b"])


def test_parameters_that_were_trained_and_are_now_frozen_keep_their_trained_values(tmp_path):
    step, freezing = training_both(), training_only_b()
    state, _ = step(step.init(ones()), torch.ones(2))
    ft.checkpoint.save(tmp_path / "a", {"state": state})
    for rename in ({}, {"state.buffers": "unused"}):
        like = {"state": freezing.init(ones())}
        actual = ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename)["state"]
        assert torch.equal(actual.frozen["a"], state.params["a"])
        assert torch.equal(actual.params["b"], state.params["b"])
        freezing(actual, torch.ones(2))


def test_frozen_parameters_are_not_loaded_into_a_state_that_trains_them_without_rename(tmp_path):
    step, freezing = training_both(), training_only_b()
    ft.checkpoint.save(tmp_path / "a", {"state": freezing.init(ones())})
    like = {"state": step.init(ones())}
    message = (
        r"a parameter that is None in it was frozen: to train it, load without like=.*\n  state\.params\.a: found None"
    )
    with pytest.raises(StructureError, match=message):
        ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename={"state.opt_state": "unused"})


def test_rename_loads_frozen_parameters_into_a_state_that_trains_them(tmp_path):
    step, freezing = training_both(), training_only_b()
    state, _ = freezing(freezing.init(ones()), torch.ones(2))
    ft.checkpoint.save(tmp_path / "a", {"state": state})
    like = {"state": step.init(ft.tree.map(torch.zeros_like, ones()))}
    rename = {"state.frozen": "state.params", "state.opt_state": "unused"}
    actual = ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename)["state"]
    assert torch.equal(actual.params["a"], torch.ones(2))
    assert torch.equal(actual.params["b"], state.params["b"])


@pytest.mark.parametrize("rename", [{}, {"state.step": "unused"}])
def test_partial_refuses_to_load_none_of_the_parameters_of_a_model(rename, tmp_path):
    step = make()
    ft.checkpoint.save(tmp_path / "a", {"state": step.init()})
    wrapped = make(module=nn.Sequential(step.loss.module))
    message = r"has no (leaf|parameter) of like, which would stay as it is: it has "
    # A state in no dict, or with parameters whose names have a prefix.
    for like in (step.init(), {"state": wrapped.init()}):
        with pytest.raises(StructureError, match=message):
            ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename)
    # Of two models, one may stay as it is.
    like = {"state": step.init(), "critic": wrapped.init()}
    assert ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename).keys() == like.keys()
