"""`partition`: an optimizer for each label, with its own state and schedules."""

import pytest
import torch

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, OptionError
from ftrain.optim import adamw, partition, sgd
from tests.optim.families import rates
from tests.optim.quadratic import assert_close, assert_equal, batches, gradient, make_params, quadratic, train


def first_key(name, leaf):
    return name.split(".")[0]


def test_partition_keeps_the_structure_and_groups_the_state_by_label():
    params = {"body": [torch.ones(2), (torch.ones(3),)], "head": {"w": torch.ones(2, 2)}}
    optimizer = partition({"head": adamw(0.1), "body": sgd(0.1, momentum=0.9)}, first_key)
    state = optimizer.init(params)
    assert set(state) == {"head", "body"}
    assert set(state["head"]["mu"]) == {"head.w"}
    assert set(state["body"]["momentum"]) == {"body.0", "body.1.0"}
    moved, new_state = optimizer.update(tree.map(torch.ones_like, params), state, params, rates(optimizer))
    assert tree.signature(moved) == tree.signature(params)
    assert isinstance(moved["body"][1], tuple)
    assert tree.signature(new_state) == tree.signature(state)


def test_partition_prefixes_schedules_with_their_labels():
    inner = partition({"x": sgd(1.0), "y": sgd(2.0)}, lambda name, leaf: name[-1])
    outer = partition({"a": inner, "b": sgd(lambda k: 3.0 + k)}, first_key)
    assert {name: schedule(1) for name, schedule in outer.schedules.items()} == {
        "a/x/lr": 1.0,
        "a/y/lr": 2.0,
        "b/lr": 4.0,
    }
    params = {"a": {"x": torch.zeros(1), "y": torch.zeros(1)}, "b": torch.zeros(1)}
    moved, _ = outer.update(tree.map(torch.ones_like, params), outer.init(params), params, rates(outer))
    assert [float(leaf) for leaf in tree.leaves(moved)] == [-1.0, -2.0, -3.0]


def test_each_optimizer_of_a_partition_follows_its_own_schedule():
    parts = {"a": sgd(ft.schedules.linear(0.1, 0.0, 5)), "b": sgd(ft.schedules.constant(0.3))}
    step = ft.train_step(quadratic, partition(parts, {"a": ["conv"]}))
    state, params = step.init(make_params()), make_params()
    for k, batch in enumerate(batches(5)):
        state, metrics = step(state, batch)
        a_rate, b_rate = 0.1 * (1 - k / 5), 0.3
        assert (metrics["a/lr"], metrics["b/lr"]) == pytest.approx((a_rate, b_rate))
        grads = gradient(params, batch)
        params = {name: leaf - (a_rate if name == "conv" else b_rate) * grads[name] for name, leaf in params.items()}
    assert_close(state.params, params)


def test_partition_by_patterns_equals_partition_by_a_function():
    parts = {"a": sgd(0.1, momentum=0.9), "b": adamw(0.02)}
    expected = train(partition(parts, lambda name, leaf: "a" if name in ("conv", "out") else "b"), 5)
    for labels in (
        {"a": ["conv", "o*"]},
        {"b": ["norm", "scale", "empty"]},
        {"a": ["c*", "out"], "b": lambda name, leaf: name in ("norm", "scale", "empty")},
    ):
        assert_equal(train(partition(parts, labels), 5), expected)


def test_one_partition_updates_models_of_different_shapes():
    parts = {"matrices": sgd(0.1), "rest": sgd(0.2)}
    optimizer = partition(parts, lambda name, leaf: "matrices" if leaf.ndim == 2 else "rest")
    for shapes in (((2, 2), (3,)), ((3,), (2, 2)), ((2, 2), (3,))):
        params = {name: torch.ones(shape) for name, shape in zip("ab", shapes, strict=True)}
        moved, _ = optimizer.update(params, optimizer.init(params), params, {"matrices/lr": 0.1, "rest/lr": 0.2})
        for leaf in moved.values():
            assert torch.allclose(leaf, torch.full_like(leaf, 0.9 if leaf.ndim == 2 else 0.8))


def test_partition_of_an_empty_tree():
    optimizer = partition({"a": sgd(0.1), "b": adamw(0.1)}, first_key)
    moved, _ = optimizer.update({}, optimizer.init({}), {}, rates(optimizer))
    assert moved == {}


def test_partition_refuses_two_leaves_of_the_same_name():
    """The state of each label is by name."""
    optimizer = partition({"all": sgd(1.0)}, lambda name, leaf: "all")
    with pytest.raises(ComposeError, match=r"partition: two parameters are called a\.b; rename one"):
        optimizer.init({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})


def test_partition_does_not_change_frozen_parameters():
    optimizer = partition({"a": sgd(0.1), "b": adamw(0.1)}, first_key)
    step = ft.train_step(lambda p, x: (p["a"] * p["b"] * p["c"] * x).sum(), optimizer, trainable=["a", "b"])
    state = step.init({name: torch.ones(2) for name in "abc"})
    state, metrics = step(state, torch.ones(2))
    assert torch.equal(state.frozen["c"], torch.ones(2))
    assert state.params["c"] is None
    assert {"a/lr", "b/lr"} <= set(metrics)


def test_partition_refuses_unknown_and_unused_labels():
    optimizer = partition({"a": sgd(0.1), "b": sgd(0.1)}, first_key)
    with pytest.raises(OptionError, match=r"partition: label_fn gave x the label 'x'; the optimizers are a, b"):
        optimizer.init({name: torch.ones(1) for name in "abx"})
    with pytest.raises(OptionError, match=r"partition: no parameter has the label b; all have a"):
        optimizer.init({"a": torch.ones(1)})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"a": ["*"], "b": ["out"]}, "partition: out has the labels a and b; make their patterns disjoint"),
        ({"a": ["conv", "out"], "b": ["scale", "empty"]}, "partition: norm has no label; add a pattern"),
        ({"b": ["nrom"]}, "partition: b names 'nrom', and no parameter matches; there are norm, conv"),
    ],
    ids=["two labels", "no label", "no parameter"],
)
def test_patterns_that_do_not_give_each_parameter_one_label_are_refused(labels, message):
    optimizer = partition({"a": sgd(0.1), "b": sgd(0.1)}, labels)
    with pytest.raises(OptionError, match=message):
        optimizer.init(make_params())


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"a": partition({"b": sgd(0.1)}, lambda name, leaf: "b"), "a/b": sgd(0.5)}, "a/b/lr"),
        ({1: sgd(0.1), "1": sgd(0.5)}, "1/lr"),
    ],
    ids=["nested", "number"],
)
def test_partition_refuses_labels_that_give_two_rates_one_name(parts, name):
    with pytest.raises(OptionError, match=rf"partition: two optimizers have a value called {name}; rename a label"):
        partition(parts, first_key)


def test_partition_refuses_labels_and_optimizers_that_do_not_belong_together():
    parts = {"a": sgd(0.1), "b": sgd(0.1)}
    with pytest.raises(OptionError, match=r"partition: there is no optimizer for c; there are \['a', 'b'\]"):
        partition(parts, {"c": ["*"]})
    with pytest.raises(OptionError, match=r"partition: a, b have no patterns; one label at most"):
        partition(parts, {})
    with pytest.raises(OptionError, match=r"partition: label_fn is \['a'\]"):
        partition(parts, ["a"])
    with pytest.raises(
        OptionError, match=r"partition: label_fn is a function \(params\); needs \(name, leaf\) -> label"
    ):
        partition(parts, lambda params: {"conv": "a"})
    with pytest.raises(ComposeError, match=r"partition: b is 0\.1; needs an optimizer"):
        partition({**parts, "b": 0.1}, {"a": ["*"]})
