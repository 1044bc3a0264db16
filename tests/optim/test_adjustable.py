"""`adjustable` and `adjust`: factors of the schedules that the state holds."""

import math

import pytest
import torch

import ftrain as ft
from ftrain import optim
from ftrain.errors import ComposeError, OptionError, StructureError
from tests.optim.quadratic import F64, assert_close, batches, gradient, make_params, quadratic


def test_factors_multiply_the_schedule_and_change_without_recompilation():
    schedule = ft.schedules.linear(0.2, 0.1, 10)
    step = ft.train_step(quadratic, optim.adjustable(optim.sgd(schedule)))
    step = ft.compose(step, ft.compiled(backend="eager", max_graphs=1))
    state, params = step.init(make_params()), make_params()
    for k, batch in enumerate(batches(6)):
        factor = 1.0 if k < 2 else 0.5**k
        state = optim.adjust(state, {"lr": factor})
        state, metrics = step(state, batch)
        assert metrics["lr"] == schedule(k) * factor
        grads = gradient(params, batch)
        params = {name: leaf - schedule(k) * factor * grads[name] for name, leaf in params.items()}
    assert_close(state.params, params)


def test_adjust_takes_patterns_and_leaves_its_state_unchanged():
    parts = {"a": optim.sgd(0.1), "b": optim.adamw(0.1)}
    optimizer = optim.adjustable(optim.partition(parts, {"a": ["conv", "out"]}))
    step = ft.train_step(quadratic, optimizer)
    state = step.init(make_params())
    changed = optim.adjust(state, {"*/lr": 0.5, "b/lr": 0.25})
    assert {name: float(value) for name, value in changed.opt_state["factors"].items()} == {"a/lr": 0.5, "b/lr": 0.25}
    assert {float(value) for value in state.opt_state["factors"].values()} == {1.0}
    assert optim.adjust(changed, {"a/lr": 0.5}) is changed
    _, metrics = step(changed, torch.ones((), dtype=F64))
    assert metrics["a/lr"] == 0.1 * 0.5


@pytest.mark.parametrize("name", ["lookahead", "all/lookahead"])
def test_a_pattern_of_adjust_does_not_change_when_lookahead_is_due(name):
    optimizer = optim.lookahead(optim.sgd(0.1), 2)
    if name == "all/lookahead":
        optimizer = optim.partition({"all": optimizer}, lambda name, leaf: "all")
    step = ft.train_step(quadratic, optim.adjustable(optimizer))
    state = optim.adjust(step.init(make_params()), {"*": 0.0})
    for due in (0.0, 1.0):
        state, metrics = step(state, torch.ones((), dtype=F64))
        assert metrics[name] == due
        assert metrics[name.replace("lookahead", "lr")] == 0.0
    with pytest.raises(OptionError, match=r"no scheduled value is called '.*lookahead'; there are (all/)?lr$"):
        optim.adjust(state, {name: 0.0})


def test_adjust_refuses_unknown_names_bad_factors_and_other_states():
    plain = ft.train_step(quadratic, optim.sgd(0.1))
    step = ft.train_step(quadratic, optim.adjustable(optim.sgd(0.1)))
    state = step.init(make_params())
    with pytest.raises(StructureError, match="adjust: the optimizer of the state is not adjustable"):
        optim.adjust(plain.init(make_params()), {"lr": 0.5})
    with pytest.raises(OptionError, match=r"no scheduled value is called 'rate'; there are lr"):
        optim.adjust(state, {"rate": 0.5})
    for factor in (math.nan, math.inf, -1.0, "1", True, None):
        with pytest.raises(OptionError, match="adjust: the factor of lr is"):
            optim.adjust(state, {"lr": factor})
    with pytest.raises(OptionError, match=r"adjust: factors is 0\.5; needs name -> factor"):
        optim.adjust(state, 0.5)
    with pytest.raises(StructureError, match="adjust: the state is dict; needs the TrainState"):
        optim.adjust(state.opt_state, {"lr": 0.5})


@pytest.mark.parametrize(
    "combine",
    [
        lambda optimizer: optim.partition({"a": optimizer}, lambda name, leaf: "a"),
        optim.chain,
        optim.lookahead,
        optim.adjustable,
    ],
    ids=["partition", "chain", "lookahead", "adjustable"],
)
def test_an_adjustable_optimizer_within_another_is_refused(combine):
    with pytest.raises(ComposeError, match="adjustable goes around the whole optimizer, once"):
        combine(optim.adjustable(optim.sgd(0.1)))
