"""Parameters that cannot be trained, and patterns that match no parameter."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import OptionError, StructureError
from tests.faults.problem import failing, make, params


@pytest.mark.parametrize(
    ("tree", "actual"),
    [
        ({"w": torch.ones(3), "i": torch.arange(3)}, "params.i is int64[3]"),
        ({"w": torch.ones(3), "deep": [{"flag": torch.ones(2, dtype=torch.bool)}]}, "params.deep.0.flag is bool[2]"),
        ({"w": torch.ones(3), "c": [1.0]}, "params.c.0 is float"),
        ({"w": torch.ones(3), "name": "layer"}, "params.name is str"),
        ({"w": torch.ones(3, dtype=torch.complex64)}, "params.w is complex64[3]"),
        ({"w": torch.ones(3).to(torch.float8_e4m3fn)}, "params.w is float8_e4m3fn[3]"),
        (torch.arange(3), "params is int64[3]"),
    ],
)
def test_a_leaf_that_cannot_be_trained_is_an_error_that_names_it(tree, actual):
    with failing(StructureError, "Step.init", actual, "floating-point tensor", "trainable="):
        make().init(tree)


def test_a_generator_in_place_of_a_tree_of_parameters_is_an_error():
    with failing(StructureError, "Step.init: params is generator; needs a tree of tensors", "ft.from_module"):
        make().init(nn.Linear(3, 1).parameters())


@pytest.mark.parametrize("tree", [{}, [], {"a": None}, ()])
def test_a_tree_without_parameters_is_an_error(tree):
    with failing(StructureError, "Step.init", "no parameter", "at least one tensor"):
        make().init(tree)


def test_init_without_parameters_and_without_a_module_is_an_error():
    with failing(StructureError, "Step.init", "squares", "step.init(params)"):
        make().init()


def test_integers_may_be_frozen():
    def loss(params, batch):
        return params["table"][params["index"]].sum()

    step = make(loss, trainable=["table"])
    tree = {"table": torch.ones(4), "index": torch.tensor([1, 1])}
    state = step.init(tree)
    new, _ = step(state, None)
    assert torch.equal(new.frozen["index"], tree["index"])
    assert new.params["index"] is None


def test_a_module_without_a_trainable_parameter_is_an_error():
    module = nn.Linear(3, 1).requires_grad_(False)
    step = ft.train_step(ft.from_module(module, lambda model, batch: model(batch).sum()), ft.optim.sgd(0.1))
    with failing(StructureError, "Step.init", "no parameter", "requires_grad"):
        step.init()


@pytest.mark.parametrize(("patterns", "unmatched"), [(["zz.*"], "zz.*"), (["w", "bias"], "bias")])
def test_a_pattern_that_matches_no_parameter_is_an_error(patterns, unmatched):
    with pytest.raises(ft.errors.FtrainError, match="trainable") as caught:
        make(trainable=patterns).init(params())
    assert type(caught.value) in (OptionError, StructureError)
    assert repr(unmatched) in str(caught.value)
    assert "w" in str(caught.value)


def test_a_str_in_place_of_a_list_of_patterns_is_an_error():
    # Its characters, "b" and "*", would be two patterns, and "*" matches all parameters.
    with pytest.raises(ft.errors.FtrainError, match="trainable") as caught:
        make(trainable="b*").init(params())
    assert type(caught.value) is OptionError
    assert "['b*']" in str(caught.value)
