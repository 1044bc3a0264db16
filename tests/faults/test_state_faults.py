"""States of another step, consumed states, and calls that fail, after which the state must be unchanged."""

import contextlib
import copy
import dataclasses
import logging

import pytest
import torch

import ftrain as ft
from ftrain.errors import ConsumedError, StructureError
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, params, squares

SGD = ft.optim.sgd(0.1)
MOMENTUM = ft.optim.sgd(0.1, momentum=0.9)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

CAPTURED = ft.compiled(backend="eager")
DONATED = {
    "eager": ft.donated(),
    "whole": ft.compiled(backend="eager", lowering="whole", donate=True),
    "split": ft.compiled(backend="eager", lowering="split", donate=True),
}
KEPT = {
    "eager": ft.accumulate(2),
    "whole": ft.compiled(backend="eager", lowering="whole"),
    "auto": ft.compiled(backend="eager"),
    "split": ft.compiled(backend="eager", lowering="split"),
}


@pytest.mark.parametrize("compiled", [(), (CAPTURED,)], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("step", "other_step", "lines"),
    [
        (make(optimizer=SGD), make(optimizer=MOMENTUM), ["opt_state.momentum.w: missing, needs float32[3]"]),
        (make(optimizer=MOMENTUM), make(optimizer=SGD), ["opt_state.momentum.w: unexpected float32[3]"]),
        (make(), make(squares, ft.ema(0.9)), ["slots.ema.b: missing", "slots.ema.w: missing, needs float32[3]"]),
        (make(squares, ft.ema(0.9)), make(), ["slots.ema.b: unexpected", "slots.ema.w: unexpected float32[3]"]),
        (make(), make(squares, ft.with_amp("fp16")), ["slots.with_amp.scale: missing", "slots.with_amp.good: missing"]),
        (make(optimizer=SGD), make(), ["opt_state.count: missing", "opt_state.mu.w: missing", "opt_state.nu.b"]),
    ],
)
def test_a_state_of_another_structure_is_an_error_that_lists_the_differences(step, other_step, lines, compiled):
    other_step = ft.compose(other_step, *compiled)
    with failing(StructureError, "Step", "structure", *lines):
        other_step(step.init(params()), batch())


def test_a_state_with_another_shape_is_an_error():
    step = make(optimizer=MOMENTUM)
    state = step.init(params())
    state.opt_state["momentum"]["w"] = torch.zeros(4)
    with failing(StructureError, "opt_state.momentum.w: found float32[4], needs float32[3]"):
        step(state, batch())


@pytest.mark.parametrize(
    "wrappers", [[], [ft.donated()], [ft.update_in_backward()]], ids=["plain", "donated", "in_backward"]
)
@pytest.mark.parametrize(
    "optimizer", [MOMENTUM, ft.optim.adam(0.1), ft.optim.adafactor(0.1)], ids=lambda optimizer: optimizer.name
)
def test_a_parameter_of_another_shape_in_a_state_that_a_step_returned_is_an_error(optimizer, wrappers):
    """Fused kernels of torch would write beyond the end of the moments."""
    step = make(squares, *wrappers, optimizer=optimizer)
    state, _ = step(step.init(params()), batch())
    state.params["w"] = torch.ones(5)
    with failing(StructureError, "the parameter w is float32[5], and its state is float32[3]", "step.init(params)"):
        step(state, {"x": torch.ones(4, 5), "y": torch.zeros(4)})


def test_a_state_of_an_equal_step_can_be_used():
    state, _ = make()(make().init(params()), batch())
    expected, _ = make()(make().init(params()), batch())
    assert_same_bits(state, expected)


@pytest.mark.parametrize("state", [None, params(), 3], ids=["none", "params", "number"])
def test_an_object_that_is_not_a_state_is_an_error(state):
    with failing(StructureError, "Step", type(state).__name__, "step.init()"):
        make()(state, batch())


def test_the_average_of_a_state_without_one_is_an_error():
    with failing(StructureError, "averaged", "ft.ema(decay)"):
        ft.averaged(make().init(params()))


@pytest.mark.parametrize("name", DONATED)
def test_a_donated_state_cannot_be_used(name):
    step = make(squares, DONATED[name])
    first = step.init(params())
    second, _ = step(first, batch())
    third, _ = step(second, batch())
    for used in (first, second):
        with failing(ConsumedError, "TrainState", "donated", "ft.tree.clone"):
            step(used, batch())
        with failing(ConsumedError, "TrainState.params", "donated"):
            _ = used.params
        with failing(ConsumedError, "TrainState.step", "donated"):
            ft.fit(step, used, [batch()], progress=False)
        with failing(ConsumedError, "donated"):
            ft.evaluate(ft.eval_step(squares), used, [batch()])
        with failing(ConsumedError, "donated"):
            ft.tree.clone(used)
    assert int(third.step) == 2


def test_a_state_given_to_fit_is_consumed_and_says_so():
    step = make()
    state = step.init(params())
    ft.fit(step, state, [batch()], progress=False)
    with failing(ConsumedError, "TrainState", "donated", "ft.tree.clone"):
        step(state, batch())


def test_a_consumed_state_has_no_other_attributes_either():
    step = make(squares, ft.donated())
    state = step.init(params())
    step(state, batch())
    with pytest.raises(AttributeError, match="no attribute 'weights'"):
        _ = state.weights


@pytest.mark.parametrize("average_name", ["ema", "swa"])
@pytest.mark.parametrize("name", DONATED)
def test_an_average_is_consumed_with_the_state_whose_memory_it_shares(name, average_name):
    step = make(squares, {"ema": ft.ema(0.5), "swa": ft.swa()}[average_name], DONATED[name])
    state, _ = step(step.init(params()), batch())
    average, copied = ft.averaged(state), ft.tree.clone(ft.averaged(state))
    before = ft.tree.clone(copied)
    state, _ = step(state, batch())
    with failing(ConsumedError, "TrainState.params", "one whose memory it shares", "ft.tree.clone"):
        ft.evaluate(ft.eval_step(squares), average, [batch()])
    assert_same_bits(copied, before)
    average = ft.averaged(state)
    make(squares, {"ema": ft.ema(0.5), "swa": ft.swa()}[average_name])(state, batch())
    assert average.params is not None  # This step does not donate.


def test_an_adjusted_state_is_consumed_with_the_old_one_and_not_the_other_way_round():
    step = make(squares, ft.donated(), optimizer=ft.optim.adjustable(SGD))
    state = step.init(params())
    low, high = (ft.optim.adjust(state, {"lr": factor}) for factor in (0.1, 2.0))
    before = ft.tree.clone(high)
    step(low, batch())
    assert_same_bits(high, before)
    step(state, batch())
    with failing(ConsumedError, "TrainState.params", "one whose memory it shares"):
        _ = high.params


def test_a_merged_state_and_the_average_of_one_are_consumed_with_the_one_that_they_share():
    step = make(lambda params, x: (x @ params["w"]).mean(), ft.lora(1, targets=["w"]), ft.ema(0.5), ft.donated())
    state = step.init({"w": torch.ones(3, 2)})
    merged = [ft.adapters.merge(step, state), ft.adapters.merge(step, ft.averaged(state))]
    step(state, torch.ones(4, 3))
    for merged_state in merged:
        with failing(ConsumedError, "TrainState.params", "ft.tree.clone"):
            _ = merged_state.params


def assert_unchanged_or_consumed(state, before):
    """Assert that a state has the same bits as before, unless it is consumed: then it cannot be read by mistake."""
    with contextlib.suppress(ConsumedError):
        assert_same_bits(state, before)


@pytest.mark.parametrize("name", ["fit", *DONATED])
def test_a_copy_with_another_key_leaves_the_original_alone(name):
    # Runs with different seeds may start from one state: the first must not change it for the second.
    step = make() if name == "fit" else make(squares, DONATED[name])
    state = step.init(params())
    before = ft.tree.clone(state)
    other = dataclasses.replace(state, rng=ft.random.key(1))
    if name == "fit":
        ft.fit(step, other, [batch()], progress=False)
    else:
        step(other, batch())
    assert_unchanged_or_consumed(state, before)


def test_training_on_from_the_averages_leaves_the_original_alone():
    step = make(squares, ft.ema(0.9))
    state, _ = step(step.init(params()), batch())
    before = ft.tree.clone(state)
    expected, _ = step(ft.averaged(state), batch())
    actual, _ = ft.fit(step, ft.averaged(state), [batch()], progress=False)
    assert_same_bits(actual, expected)
    assert_unchanged_or_consumed(state, before)


def flaky(params, batch):
    """Fails on batches that say so; with accumulate, in the last piece only."""
    if "fail" in batch and float(batch["x"][-1, -1]) > 1:
        raise ValueError("boom in the loss")
    return squares(params, batch)


def flaky_when_traced(params, batch):
    if "fail" in batch:
        raise ValueError("boom in the loss")
    return squares(params, batch)


FLAKY = [
    pytest.param(flaky, (), id="eager"),
    pytest.param(flaky, (ft.donated(),), id="eager-donated"),
    pytest.param(flaky, (ft.accumulate(2), ft.clip(1.0), ft.ema(0.9)), id="stack"),
    pytest.param(flaky, (ft.accumulate(2), ft.clip(1.0), ft.ema(0.9), ft.donated()), id="stack-donated"),
    pytest.param(flaky, (ft.with_amp("fp16"), ft.skip_nonfinite(), ft.donated()), id="guarded-donated"),
    *[pytest.param(flaky_when_traced, (KEPT[name],), id=name) for name in ("whole", "auto", "split")],
    *[pytest.param(flaky_when_traced, (DONATED[name],), id=f"{name}-donated") for name in ("whole", "split")],
    pytest.param(flaky_when_traced, (ft.compiled(backend="eager", donate=True),), id="auto-donated"),
]


@pytest.mark.parametrize(("loss", "wrappers"), FLAKY)
def test_a_call_that_fails_loses_nothing(loss, wrappers):
    step = make(loss, *wrappers)
    state, _ = step(step.init(params()), batch())
    before, random_state = ft.tree.clone(state), torch.get_rng_state()
    with pytest.raises(ValueError, match="boom in the loss"):
        step(state, {**batch(), "fail": True})
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()
    assert_same_bits(state, before)
    # The next step has the same bits as without the failure.
    state, metrics = step(state, batch())
    fresh = make(loss, *wrappers)
    expected, expected_metrics = fresh(fresh(fresh.init(params()), batch())[0], batch())
    assert_same_bits(state, expected)
    assert_same_bits(metrics, expected_metrics)


def test_an_error_of_the_loss_does_not_change_the_lowering(caplog):
    step = make(flaky_when_traced, ft.compiled(backend="eager"))
    state = step.init(params())
    with caplog.at_level(logging.WARNING, "ftrain"), pytest.raises(ValueError, match="boom in the loss"):
        step(state, {**batch(), "fail": True})
    assert not caplog.records
    step(state, batch())
    assert "split" not in repr(step)


@pytest.mark.parametrize("wrappers", [(), (ft.donated(),)], ids=["kept", "donated"])
def test_an_error_found_by_the_step_itself_loses_nothing(wrappers):
    step = make(squares, ft.accumulate(2), *wrappers)
    state, _ = step(step.init(params()), batch())
    before = ft.tree.clone(state)
    with failing(ft.errors.BatchError, "batch.x"):
        step(state, {**batch(), "y": torch.zeros(2)})
    assert_same_bits(state, before)
    step(state, batch())


def test_a_failing_call_leaves_no_graph_behind():
    # A copy of a tensor that still hangs on a graph is an error in torch.
    step = make(flaky)
    state = step.init(params())
    with pytest.raises(ValueError, match="boom"):
        step(state, {**batch(), "fail": True})
    copy.deepcopy(state.params)
    assert not any(leaf.requires_grad for leaf in ft.tree.leaves(state))
