"""Decisions from the metrics of a run: rates that fall on a plateau, early stopping and the best checkpoint."""

import dataclasses
import math
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ftrain as ft
from ftrain import optim, tree
from ftrain.errors import ComposeError, ConsumedError, OptionError, StructureError
from ftrain.training.history import History

metrics = st.lists(st.one_of(st.floats(-2, 2), st.just(math.nan), st.sampled_from([0.0, 1.0, -1.0])), max_size=40)


@given(
    metrics,
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
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    options = {
        "mode": mode,
        "threshold_mode": threshold_mode,
        "patience": patience,
        "cooldown": cooldown,
        "factor": factor,
    }
    options |= {"threshold": threshold, "eps": eps}
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=end, **options)
    plateau = ft.schedules.reduce_on_plateau(0.3, end=end, **options)
    for metric in metrics:
        before = plateau
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step(metric)
        plateau = plateau.after(metric)
        assert plateau.value == optimizer.param_groups[0]["lr"]
        # `after` changes nothing. After NaN the two are not equal, because NaN is not equal to itself.
        assert before.after(metric) == plateau or math.isnan(metric)


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


def build(*wrappers):
    return ft.compose(
        ft.train_step(lambda p, batch: (p["w"] * batch).sum(), optim.adjustable(optim.sgd(0.5))), *wrappers
    )


def start(step):
    return step.init({"w": torch.ones(2)})


def evaluations(values):
    """Return an evaluation whose score after step k is `values[k - 1]`."""
    return lambda state: {"score": values[int(state.step) - 1]}


VALUES = [5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0]
DATA = [torch.tensor([1.0, 2.0])] * 10


def run(step, steps=None, data=DATA, **more):
    """Train with a rate that is halved when the score has not improved for two evaluations."""
    rule = ft.schedules.reduce_on_plateau(factor=0.5, patience=1)
    options = {"adapt": ft.plateau("eval_score", rule), "evaluate": evaluations(VALUES), "evaluate_every": 1}
    return ft.fit(step, start(step), data, progress=False, **{"steps": steps, **options, **more})


def rates_by_hand():
    """Return the rate of each step of `run`."""
    rule, rates = ft.schedules.reduce_on_plateau(factor=0.5, patience=1), []
    for value in VALUES:
        rates.append(0.5 * rule.value)
        rule = rule.after(value)
    return rates


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager", max_graphs=1),)], ids=["eager", "compiled"])
def test_fit_lowers_the_rate(donate, wrappers):
    state, history = run(build(*wrappers), 10, donate=donate)
    assert history["lr"] == rates_by_hand()
    assert len(set(history["lr"])) == 4
    torch.testing.assert_close(state.params["w"], 1 - sum(rates_by_hand()) * DATA[0])


def test_a_resumed_run_has_the_rates_of_an_uninterrupted_one(tmp_path):
    uninterrupted, history = run(build(), 10)
    for stop in (3, 4, 5, 8):
        directory = tmp_path / str(stop)
        run(build(), stop, checkpoints=ft.Checkpoints(directory, every=2))
        state, resumed = run(build(), 10, checkpoints=ft.Checkpoints(directory, every=2))
        assert resumed["lr"] == history["lr"]
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(uninterrupted), strict=True))


@pytest.mark.parametrize("log_every", [1, 10])
@pytest.mark.parametrize("failing", ["logger", "adapt"])
def test_adapt_is_called_once_for_an_evaluation_after_which_the_run_failed_and_was_resumed(
    failing, log_every, tmp_path
):
    adapted = []

    def fail(caller, record):
        if caller == failing and record["step"] == 3 and "eval_score" in record:
            raise OSError(caller)

    def adapt(state, history):
        fail("adapt", history[-1])
        adapted.append(int(state.step))
        return dataclasses.replace(state, params={"w": state.params["w"] * 2})

    def train(epochs, adapt, loggers=()):
        options = {"evaluate_every": 2, "loggers": loggers, "log_every": log_every, "adapt": adapt}
        return run(build(), checkpoints=ft.Checkpoints(tmp_path, every=9), epochs=epochs, data=DATA[:3], **options)

    with pytest.raises(OSError, match=failing):
        train(1, adapt, [partial(fail, "logger")])
    failing = None
    for epochs in (1, 1, 2):
        state, _ = train(epochs, adapt)
    assert adapted == [2, 3, 4, 6]
    expected = [1.0, 1.0]
    for number in range(1, 7):
        factor = 2 if number in adapted else 1
        expected = [factor * (value - 0.5 * x) for value, x in zip(expected, (1.0, 2.0), strict=True)]
    assert state.params["w"].tolist() == expected


def test_without_evaluations_plateau_reads_the_metrics_of_the_steps():
    rule = ft.schedules.reduce_on_plateau(factor=0.5, patience=0)
    step = ft.train_step(lambda p, batch: 0 * p["w"].sum() + batch, optim.adjustable(optim.sgd(0.5)))
    _, history = ft.fit(
        step, start(step), [torch.ones(())] * 9, adapt=ft.plateau("loss", rule), log_every=3, progress=False
    )
    assert history["lr"] == [0.5] * 3 + [0.5 * 0.5**2] * 3 + [0.5 * 0.5**5] * 3


def test_patience_reads_each_record_of_a_growing_history_once_and_a_different_history_anew():
    reads = []

    class Record(dict):
        def get(self, *arguments):
            reads.append(arguments)
            return super().get(*arguments)

    stop, losses = ft.patience("loss", 2), [3.0, 2.0, 4.0, 1.0, 1.5, 1.25]
    history, reasons = History(), []
    for loss in losses:
        history.extend([Record(loss=loss), Record(other=0.0)])
        reasons.append(stop(history))
    assert reasons == [""] * 5 + ["patience(loss)"]
    assert len(reads) == len(history)
    assert stop(History(history[:4])) == ""
    assert stop(history) == "patience(loss)"
    del history[8:]
    assert stop(history) == ""


def test_a_state_that_adapt_returns_replaces_the_old_one():
    """Tensors that `adapt` puts into it are copied, the others are not; the state passed to `adapt` is consumed."""
    kept, seen = torch.full((2,), 7.0), []

    def adapt(state, history):
        seen.append(state)
        return ft.types.replace(state, params={"w": kept}) if len(seen) == 2 else state

    state, _ = run(build(), 4, adapt=adapt)
    assert torch.equal(kept, torch.full((2,), 7.0))
    torch.testing.assert_close(state.params["w"], 7 - (0.5 + 0.5) * DATA[0])
    with pytest.raises(ConsumedError):
        _ = seen[1].params


def test_a_state_sent_to_iterate_is_the_state_of_the_next_step():
    step = build()
    records, rates = ft.iterate(step, start(step), DATA), []
    for record in records:
        rates.append(record.metrics["lr"])
        if record.step == 3:
            sent = records.send(optim.adjust(record.state, {"lr": 0.1}))
            assert sent.step == 3
            assert float(sent.state.opt_state["factors"]["lr"]) == 0.1
    assert rates == [0.5] * 3 + [0.05] * 7


def score(state):
    return {"accuracy": 0.5, "vector": torch.ones(2)}


WRONG_METRICS = {
    "patience": (
        lambda tmp_path: {"stop": ft.patience("accuracy", mode="max"), "evaluate": score},
        r"patience: nothing is recorded as 'accuracy'; there are eval_accuracy, ",
        2,
    ),
    "patience of steps": (
        lambda tmp_path: {"stop": ft.patience("eval_loss")},
        r"patience: nothing is recorded as 'eval_loss'; there are loss, .*What evaluate= returns",
        2,
    ),
    "plateau": (
        lambda tmp_path: {"adapt": ft.plateau("eval_acuracy", ft.schedules.reduce_on_plateau()), "evaluate": score},
        r"plateau: nothing is recorded as 'eval_acuracy'; there are eval_accuracy, ",
        2,
    ),
    "best": (
        lambda tmp_path: {"checkpoints": ft.Checkpoints(tmp_path, every=2, best="acc", mode="max"), "evaluate": score},
        r"Checkpoints\(best=\): nothing is recorded as 'acc'; there are eval_accuracy, ",
        2,
    ),
    "best of a vector": (
        lambda tmp_path: {"checkpoints": ft.Checkpoints(tmp_path, every=2, best="eval_vector"), "evaluate": score},
        r"Checkpoints\(best=\): 'eval_vector' must be a number of each evaluation; found \[1\.0, 1\.0\]",
        2,
    ),
    "best at the end": (
        lambda tmp_path: {
            "checkpoints": ft.Checkpoints(tmp_path, every=3, best="loss_"),
            "evaluate": score,
            "evaluate_every": None,
        },
        r"Checkpoints\(best=\): nothing is recorded as 'loss_'; there are loss, ",
        10,
    ),
}


def test_patience_without_its_call_is_refused_as_stop():
    # Called with a history, `ft.patience` takes it for the name of a metric and returns a function, which is true.
    step = build()
    with pytest.raises(
        OptionError, match=r"stop returned a function; needs .* pass what it returns: ft\.patience\('eval_loss'\)"
    ):
        ft.fit(step, start(step), DATA, evaluate=score, evaluate_every=2, stop=ft.patience, progress=False)


@pytest.mark.parametrize("case", WRONG_METRICS)
def test_a_metric_that_is_not_recorded_is_an_error_at_the_first_evaluation(case, tmp_path):
    options, message, error_step = WRONG_METRICS[case]
    step = build()
    options = {"evaluate_every": 2, "log_every": 2, **options(tmp_path)}
    if "evaluate" not in options:
        options["evaluate_every"] = None
    with pytest.raises(OptionError, match=message) as caught:
        ft.fit(step, start(step), DATA, progress=False, **options)
    assert int(caught.value.result.state.step) == error_step


@pytest.mark.parametrize("name", ["stop", "adapt"])
def test_stop_and_adapt_need_evaluations_during_the_run(name):
    step, functions = build(), {"stop": ft.patience("eval_loss"), "adapt": lambda state, history: state}
    with pytest.raises(OptionError, match=f"{name} is called after evaluations.*pass evaluate_every="):
        ft.fit(step, start(step), DATA, progress=False, evaluate=score, **{name: functions[name]})


@pytest.mark.parametrize(
    "choose",
    [
        lambda name, mode: ft.Checkpoints("unused", every=1, best=name, mode=mode),
        lambda name, mode: ft.patience(name, mode=mode),
        lambda name, mode: ft.plateau(name, ft.schedules.reduce_on_plateau(mode=mode)),
    ],
    ids=["best", "patience", "plateau"],
)
def test_a_direction_that_contradicts_the_name_of_the_metric_is_warned_of(choose, recwarn):
    for name, mode in (("eval_accuracy", "max"), ("eval_loss", "min"), ("eval_map_loss", "min"), ("eval_fid", "min")):
        choose(name, mode)
    for name in ("eval_top1_error", "eval_error_f1", "eval_neg_log_loss", "neg_accuracy"):
        choose(name, "max")
        choose(name, "min")
    assert not recwarn
    for name in ("eval_accuracy", "eval_F1", "top_acc", "val/acc1", "eval_bleu-4", "eval_mAP"):
        with pytest.warns(UserWarning, match=f"less of {name!r} counts as better; pass mode='max'"):
            choose(name, "min")
    for name in ("eval_loss", "eval_dice_loss", "val/perplexity"):
        with pytest.warns(UserWarning, match=f"more of {name!r} counts as better; pass mode='min'"):
            choose(name, "max")


def test_the_best_checkpoint_may_be_chosen_by_a_metric_of_the_steps(tmp_path):
    step = build()
    with pytest.warns(UserWarning, match="more of 'loss' counts as better"):
        checkpoints = ft.Checkpoints(tmp_path, every=2, best="loss", mode="max")
    ft.fit(step, start(step), DATA, steps=6, progress=False, checkpoints=checkpoints)
    assert checkpoints.latest(best=True).step == 2


@pytest.mark.parametrize(
    ("every", "evaluate_every", "best", "warned"),
    [
        (5, 2, "eval_score", True),
        (2, 3, "eval_score", True),
        (2, 4, "eval_score", False),
        (5, 2, "loss", False),
        (5, None, "eval_score", False),
    ],
)
def test_evaluations_of_steps_without_checkpoint_are_warned_of_if_the_best_is_kept(
    every, evaluate_every, best, warned, tmp_path
):
    step, checkpoints = build(), ft.Checkpoints(tmp_path, every=every, best=best)
    options = {"evaluate": evaluations(VALUES), "evaluate_every": evaluate_every, "checkpoints": checkpoints}
    message = rf"every={evaluate_every} is not a multiple of Checkpoints\(every={every}\)"
    with pytest.warns(UserWarning, match=message) if warned else nullcontext() as caught:
        ft.fit(step, start(step), DATA, progress=False, **options)
    if warned:
        assert len(caught) == 1
        assert caught[0].filename == __file__


def test_a_scheduler_of_torch_is_refused_as_schedule():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    for scheduler in (
        torch.optim.lr_scheduler.CosineAnnealingLR,
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ):
        with pytest.raises(OptionError, match=r"CosineAnnealingLR.*, needs a finite number, or a function from step"):
            optim.sgd(scheduler)


def test_a_schedule_without_its_call_is_refused():
    with pytest.raises(OptionError, match=r"sgd: lr is the function warmup_cosine itself; needs a call"):
        optim.sgd(ft.schedules.warmup_cosine)


@pytest.mark.parametrize("wrong", [math.nan, -0.1, "0.1", None])
def test_min_delta_of_patience_is_a_number(wrong):
    with pytest.raises(OptionError, match=r"patience: min_delta is .*, needs a number"):
        ft.patience("eval_loss", min_delta=wrong)


def test_plateau_needs_a_rule_and_an_adjustable_optimizer():
    with pytest.raises(ComposeError, match=r"plateau: the rule is 0\.5; needs ft\.schedules\.reduce_on_plateau"):
        ft.plateau("score", 0.5)
    step = ft.train_step(lambda p, batch: (p["w"] * batch).sum(), optim.sgd(0.5))
    with pytest.raises(StructureError, match="not adjustable"):
        run(step, 3)


@pytest.mark.parametrize("value", [None, "0.5", [0.5, 0.25], {"a": 0.5}, 1j])
def test_a_metric_that_is_no_number_is_refused(value):
    for call in (
        lambda history: ft.patience("eval_f1", mode="max")(history),
        lambda history: ft.plateau("eval_f1", ft.schedules.reduce_on_plateau(mode="max"))(None, history),
    ):
        with pytest.raises(OptionError, match=r"(patience|plateau): 'eval_f1' is .*; needs one number"):
            call(History([{"step": 1, "eval_f1": value}]))
