"""Learning rates that fall when a metric has stopped improving, and other states that `adapt` returns during `fit`."""

import dataclasses
import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ftrain as ft
from ftrain import optim
from ftrain.errors import ComposeError, ConsumedError, OptionError, StructureError
from tests.training.problem import assert_bitwise

metric_lists = st.lists(st.one_of(st.floats(-2, 2), st.just(math.nan), st.sampled_from([0.0, 1.0, -1.0])), max_size=40)


@given(
    metric_lists,
    st.sampled_from(["min", "max"]),
    st.sampled_from(["rel", "abs"]),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.sampled_from([0.0, 1e-4, 0.1]),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 1e-8, 1e-2]),
)
def test_reduce_on_plateau_has_the_values_of_torch(
    metrics, mode, threshold_mode, patience, cooldown, factor, threshold, end, eps
):
    options = {
        "mode": mode,
        "threshold_mode": threshold_mode,
        "patience": patience,
        "cooldown": cooldown,
        "factor": factor,
        "threshold": threshold,
        "eps": eps,
    }
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=end, **options)
    rule = ft.schedules.reduce_on_plateau(0.3, end=end, **options)
    for metric in metrics:
        previous = rule
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step(metric)
        rule = rule.after(metric)
        assert rule.value == optimizer.param_groups[0]["lr"]
        # `after` changes nothing. After NaN the two are not equal, because NaN is not equal to itself.
        assert previous.after(metric) == rule or math.isnan(metric)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1.0}, "factor is 1.0, needs a number in"),
        ({"factor": 0.0}, "factor is 0.0"),
        ({"patience": -1}, "patience"),
        ({"cooldown": 1.5}, "cooldown"),
        ({"mode": "least"}, "mode"),
        ({"threshold_mode": "both"}, "threshold_mode"),
        ({"threshold": -0.1}, "threshold is -0.1"),
        ({"value": 0.0}, "value"),
        ({"eps": math.nan}, "eps"),
    ],
)
def test_reduce_on_plateau_refuses_wrong_options(options, message):
    with pytest.raises(OptionError, match=f"reduce_on_plateau: .*{message}"):
        ft.schedules.reduce_on_plateau(**options)


BATCH = torch.tensor([1.0, 2.0])
"""The gradient of each step."""

SCORES = [5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0]
"""What the evaluation after each step returns."""


def linear_loss(params, batch):
    return (params["w"] * batch).sum()


def make_step(*wrappers):
    return ft.compose(ft.train_step(linear_loss, optim.adjustable(optim.sgd(0.5))), *wrappers)


def evaluate(state):
    return {"score": SCORES[int(state.step) - 1]}


def fit(step, length=10, **options):
    """Train with `length` batches, and a rate that is halved when the score has not improved for two evaluations."""
    rule = ft.schedules.reduce_on_plateau(factor=0.5, patience=1)
    defaults = {"adapt": ft.plateau("eval_score", rule), "evaluate": evaluate, "evaluate_every": 1, "progress": False}
    return ft.fit(step, step.init({"w": torch.ones(2)}), [BATCH] * length, **defaults | options)


def rates_by_hand():
    """Return the rate of each step of `fit`."""
    rule, rates = ft.schedules.reduce_on_plateau(factor=0.5, patience=1), []
    for score in SCORES:
        rates.append(0.5 * rule.value)
        rule = rule.after(score)
    return rates


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager", max_graphs=1),)], ids=["eager", "compiled"])
def test_fit_lowers_the_rate(donate, wrappers):
    """The new rates need no new graph."""
    state, history = fit(make_step(*wrappers), donate=donate)
    assert history["lr"] == rates_by_hand()
    assert len(set(history["lr"])) == 4
    torch.testing.assert_close(state.params["w"], 1 - sum(rates_by_hand()) * BATCH)


@pytest.mark.parametrize("first_steps", [3, 4, 5, 8])
def test_a_resumed_run_has_the_rates_of_an_uninterrupted_one(first_steps, tmp_path):
    uninterrupted, history = fit(make_step())
    fit(make_step(), steps=first_steps, checkpoints=ft.Checkpoints(tmp_path, every=2))
    state, resumed_history = fit(make_step(), steps=10, checkpoints=ft.Checkpoints(tmp_path, every=2))
    assert resumed_history["lr"] == history["lr"]
    assert_bitwise(state, uninterrupted)


@pytest.mark.parametrize("log_every", [1, 10])
@pytest.mark.parametrize("failing", ["logger", "adapt"])
def test_adapt_is_called_once_for_an_evaluation_after_which_the_run_failed_and_was_resumed(
    failing, log_every, tmp_path
):
    adapted_steps = []

    def fail(caller, record):
        if caller == failing and record["step"] == 3 and "eval_score" in record:
            raise OSError(caller)

    def double_params(state, history):
        fail("adapt", history[-1])
        adapted_steps.append(int(state.step))
        return dataclasses.replace(state, params={"w": state.params["w"] * 2})

    def train(epochs, loggers=()):
        options = {"evaluate_every": 2, "loggers": loggers, "log_every": log_every, "adapt": double_params}
        return fit(make_step(), 3, checkpoints=ft.Checkpoints(tmp_path, every=9), epochs=epochs, **options)

    with pytest.raises(OSError, match=failing):
        train(1, [partial(fail, "logger")])
    failing = None
    train(1)
    train(1)
    state, _ = train(2)
    # After the steps 2 and 4, and at the end of each epoch of three steps.
    assert adapted_steps == [2, 3, 4, 6]
    expected = torch.ones(2)
    for step in range(1, 7):
        expected = expected - 0.5 * BATCH
        if step in adapted_steps:
            expected = 2 * expected
    assert torch.equal(state.params["w"], expected)


def test_without_evaluations_plateau_reads_the_metrics_of_the_steps():
    """Three at a time (`log_every=3`). The loss is always 1, so each step after the first lowers the rate."""
    rule = ft.schedules.reduce_on_plateau(factor=0.5, patience=0)
    step = ft.train_step(lambda params, batch: 0 * params["w"].sum() + 1, optim.adjustable(optim.sgd(0.5)))
    _, history = fit(step, 9, adapt=ft.plateau("loss", rule), evaluate=None, evaluate_every=None, log_every=3)
    assert history["lr"] == [0.5] * 3 + [0.5 * 0.5**2] * 3 + [0.5 * 0.5**5] * 3


def test_a_state_that_adapt_returns_replaces_the_old_one():
    """Tensors that `adapt` puts into it are copied, the others are not; the state passed to `adapt` is consumed."""
    new_params, states = torch.full((2,), 7.0), []

    def adapt(state, history):
        states.append(state)
        return ft.types.replace(state, params={"w": new_params}) if len(states) == 2 else state

    state, _ = fit(make_step(), steps=4, adapt=adapt)
    assert torch.equal(new_params, torch.full((2,), 7.0))
    torch.testing.assert_close(state.params["w"], 7 - (0.5 + 0.5) * BATCH)
    with pytest.raises(ConsumedError):
        _ = states[1].params


def test_an_average_that_becomes_the_parameters_goes_on_as_an_average():
    """The state that `adapt` returns has the same tensors twice, of which a donated step may overwrite only one."""

    def adapt(state, history):
        return ft.types.replace(state, params=ft.averaged(state).params) if state.step == 2 else state

    donated, copied = (
        fit(ft.ema(0.5)(make_step()), steps=4, adapt=adapt, log_every=1, donate=donate).state
        for donate in (True, False)
    )
    assert torch.equal(donated.params["w"], copied.params["w"])
    assert torch.equal(donated.slots["ema"]["w"], copied.slots["ema"]["w"])


def test_a_state_sent_to_iterate_is_the_state_of_the_next_step():
    step = make_step()
    records, rates = ft.iterate(step, step.init({"w": torch.ones(2)}), [BATCH] * 10), []
    for record in records:
        rates.append(record.metrics["lr"])
        if record.step == 3:
            replaced = records.send(optim.adjust(record.state, {"lr": 0.1}))
            assert replaced.step == 3
            assert float(replaced.state.opt_state["factors"]["lr"]) == 0.1
    assert rates == [0.5] * 3 + [0.05] * 7


def test_plateau_needs_a_rule():
    with pytest.raises(ComposeError, match=r"plateau: the rule is 0\.5; needs ft\.schedules\.reduce_on_plateau"):
        ft.plateau("score", 0.5)


def test_plateau_needs_an_adjustable_optimizer():
    step = ft.train_step(linear_loss, optim.sgd(0.5))
    with pytest.raises(StructureError, match="not adjustable"):
        fit(step, 3)


def test_a_scheduler_of_torch_is_refused_as_schedule():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler_class = torch.optim.lr_scheduler.CosineAnnealingLR
    for scheduler in (scheduler_class, scheduler_class(optimizer, 10)):
        with pytest.raises(OptionError, match=r"CosineAnnealingLR.*, needs a finite number, or a function from step"):
            optim.sgd(scheduler)


def test_a_schedule_without_its_call_is_refused():
    with pytest.raises(OptionError, match=r"sgd: lr is the function warmup_cosine itself; needs a call"):
        optim.sgd(ft.schedules.warmup_cosine)
