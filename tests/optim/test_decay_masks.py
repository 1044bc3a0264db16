"""Decay masks: functions and patterns that select the parameters that decay."""

import functools

import pytest
import torch

import ftrain as ft
from ftrain import optim, tree
from ftrain.errors import OptionError
from ftrain.optim import adamw, sgd
from ftrain.tree import name_patterns
from ftrain.tree.name_patterns import everything, matrices
from tests.optim.quadratic import assert_equal, train


def test_a_decay_mask_is_called_with_each_name_and_leaf():
    shapes = {}

    def mask(name, leaf):
        shapes[name] = tuple(leaf.shape)
        return name.endswith("w")

    params = {"layers": [{"w": torch.ones(2, 2), "b": torch.ones(2)}], "w": torch.ones(3)}
    names, zeros = tree.leaf_names(params), tree.map(torch.zeros_like, params)
    for make in (sgd, adamw):
        shapes.clear()
        optimizer = make(0.1, weight_decay=1.0, decay_mask=mask)
        moved, _ = optimizer.update(zeros, optimizer.init(params), params, {"lr": 0.1})
        assert shapes == {"layers.0.b": (2,), "layers.0.w": (2, 2), "w": (3,)}
        decayed = {name for name, leaf in zip(names, tree.leaves(moved), strict=True) if (leaf < 1).all()}
        assert decayed == {"layers.0.w", "w"}


def test_a_decay_mask_that_selects_no_parameter_is_logged(caplog):
    params = {"w": torch.ones(2, 2), "b": torch.ones(2)}

    def messages(**options):
        caplog.clear()
        adamw(0.1, **options).init(params)
        return [record.getMessage() for record in caplog.records]

    (message,) = messages(weight_decay=0.1, decay_mask=lambda name, leaf: "kernel" in name)
    assert message.startswith("adamw: weight_decay=0.1 has no effect")
    assert message.endswith("params.b, params.w")
    assert not messages(weight_decay=0.1, decay_mask=lambda name, leaf: name == "b")
    assert not messages(decay_mask=lambda name, leaf: False)
    # The default mask selects no bias, and need not.
    params = {"b": torch.ones(2)}
    assert not messages(weight_decay=0.1)


def test_the_text_of_a_decay_mask_is_the_same_in_every_process():
    """Ranks and resumed runs compare it, so it must not contain the order of a set or an address."""
    mask = functools.partial(lambda name, leaf, names: name in names, names={"a", "b"})
    assert adamw(0.1, weight_decay=0.1, decay_mask=mask).options["decay_mask"] == "partial"


def test_matrices_and_everything_select_by_the_number_of_axes():
    for ndim in range(4):
        leaf = torch.ones((1,) * ndim)
        assert matrices("w", leaf) == (ndim >= 2)
        assert everything("w", leaf)


def decaying(mask):
    return optim.adamw(0.1, weight_decay=0.5, decay_mask=mask)


def test_a_decay_mask_of_patterns_equals_a_function():
    actual = train(decaying(["conv", "s*"]), 3)
    assert_equal(actual, train(decaying(lambda name, leaf: name in ("conv", "scale")), 3))
    by_default = train(decaying(optim.matrices), 3)
    assert not torch.equal(actual.params["scale"], by_default.params["scale"])


def test_invalid_decay_masks_are_refused():
    with pytest.raises(OptionError, match=r"adamw: decay_mask names 'weight', and no parameter matches"):
        train(decaying(["weight"]), 0)
    with pytest.raises(OptionError, match=r"adamw: decay_mask is 'conv', needs a list of patterns"):
        decaying("conv")
    with pytest.raises(OptionError, match=r"adamw: decay_mask is a function \(params\); needs \(name, leaf\) -> bool"):
        decaying(lambda params: {"conv": True})
    with pytest.raises(OptionError, match=r"adamw: decay_mask is 3"):
        decaying(3)


def test_names_without_wildcards_are_not_matched_as_patterns(monkeypatch):
    """A mask may list the name of every leaf, and comparing each name with each leaf takes quadratic time."""
    compared = []

    def record_name(name, pattern):
        compared.append(name)
        return name == pattern

    monkeypatch.setattr(name_patterns, "fnmatchcase", record_name)
    params = {f"w{i}": torch.ones(()) for i in range(1000)}
    names = [f"w{i}" for i in range(0, 1000, 2)]
    step = ft.train_step(lambda params, batch: sum(params.values()), ft.optim.adamw(0.1), trainable=names)
    state = step.init(params)
    assert compared == []
    assert sum(value is not None for value in state.params.values()) == 500
