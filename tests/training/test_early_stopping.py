"""Decisions by a metric of the history, `patience` and the best checkpoint; and metrics that are unfit for them."""

import math
from contextlib import nullcontext

import pytest
import torch

import ftrain as ft
from ftrain.errors import OptionError
from ftrain.training.history import History


def fit(**options):
    """Make ten steps without wrappers."""
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adjustable(ft.optim.sgd(0.5)))
    data = [torch.tensor([1.0, 2.0])] * 10
    return ft.fit(step, step.init({"w": torch.ones(2)}), data, progress=False, **options)


def evaluate(state):
    return {"accuracy": 0.5, "vector": torch.ones(2)}


def test_patience_reads_each_record_of_a_growing_history_once_and_a_different_history_anew():
    reads = []

    class Record(dict):
        def get(self, *arguments):
            reads.append(arguments)
            return super().get(*arguments)

    stop, history, reasons = ft.patience("loss", 2), History(), []
    for loss in [3.0, 2.0, 4.0, 1.0, 1.5, 1.25]:
        history.extend([Record(loss=loss), Record(accuracy=0.0)])
        reasons.append(stop(history))
    assert reasons == [""] * 5 + ["patience(loss)"]
    assert len(reads) == len(history)
    assert stop(History(history[:4])) == ""
    assert stop(history) == "patience(loss)"
    # A history that has become shorter is different too.
    del history[8:]
    assert stop(history) == ""


def test_patience_without_its_call_is_refused_as_stop():
    # Called with a history, `ft.patience` takes it for the name of a metric and returns a function, which is true.
    message = r"stop returned a function; needs .* pass what it returns: ft\.patience\('eval_loss'\)"
    with pytest.raises(OptionError, match=message):
        fit(evaluate=evaluate, evaluate_every=2, stop=ft.patience)


@pytest.mark.parametrize("wrong", [math.nan, -0.1, "0.1", None])
def test_min_delta_of_patience_is_a_number(wrong):
    with pytest.raises(OptionError, match=r"patience: min_delta is .*, needs a number"):
        ft.patience("eval_loss", min_delta=wrong)


@pytest.mark.parametrize("options", [{"stop": ft.patience("eval_loss")}, {"adapt": lambda state, history: state}])
def test_stop_and_adapt_need_evaluations_during_the_run(options):
    (name,) = options
    with pytest.raises(OptionError, match=f"{name} is called after evaluations.*pass evaluate_every="):
        fit(evaluate=evaluate, **options)


def plateau(name, mode="min"):
    return ft.plateau(name, ft.schedules.reduce_on_plateau(mode=mode))


EVALUATIONS = {"evaluate": evaluate, "evaluate_every": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            EVALUATIONS | {"stop": ft.patience("accuracy", mode="max")},
            r"patience: nothing is recorded as 'accuracy'; there are eval_accuracy, ",
        ),
        (
            {"stop": ft.patience("eval_loss")},
            r"patience: nothing is recorded as 'eval_loss'; there are loss, .*What evaluate= returns",
        ),
        (
            EVALUATIONS | {"adapt": plateau("eval_acuracy")},
            r"plateau: nothing is recorded as 'eval_acuracy'; there are eval_accuracy, ",
        ),
    ],
    ids=["patience", "patience of steps", "plateau"],
)
def test_a_metric_that_is_not_recorded_is_an_error_when_metrics_are_first_read(options, message):
    with pytest.raises(OptionError, match=message) as caught:
        fit(log_every=2, **options)
    assert int(caught.value.result.state.step) == 2


@pytest.mark.parametrize(
    ("best", "message"),
    [
        ("acc", r"Checkpoints\(best=\): nothing is recorded as 'acc'; there are eval_accuracy, "),
        (
            "eval_vector",
            r"Checkpoints\(best=\): 'eval_vector' must be a number of each evaluation; found \[1\.0, 1\.0\]",
        ),
    ],
)
def test_a_best_metric_that_is_not_recorded_as_a_number_is_an_error_at_the_first_evaluation(best, message, tmp_path):
    with pytest.raises(OptionError, match=message) as caught:
        fit(checkpoints=ft.Checkpoints(tmp_path, every=2, best=best, mode="max"), **EVALUATIONS)
    assert int(caught.value.result.state.step) == 2


def test_a_best_metric_that_is_not_recorded_is_an_error_at_the_end_if_that_is_the_first_evaluation(tmp_path):
    message = r"Checkpoints\(best=\): nothing is recorded as 'loss_'; there are loss, "
    with pytest.raises(OptionError, match=message) as caught:
        fit(checkpoints=ft.Checkpoints(tmp_path, every=3, best="loss_"), evaluate=evaluate)
    assert int(caught.value.result.state.step) == 10


def test_a_best_metric_that_a_resumed_run_no_longer_records_is_an_error_before_the_state_is_adapted(tmp_path):
    calls = []

    def adapt(state, history):
        calls.append(int(state.step))
        return state

    def checkpoints(best):
        return ft.Checkpoints(tmp_path, every=2, best=best)

    options = {"adapt": adapt, "evaluate_every": 2}
    fit(steps=2, evaluate=lambda state: {"f": 1.0}, checkpoints=checkpoints("eval_f"), **options)
    for _ in range(2):
        with pytest.raises(OptionError, match="'eval_f' must be a number of each evaluation; found None"):
            fit(steps=4, evaluate=lambda state: {"g": 1.0}, checkpoints=checkpoints("eval_f"), **options)
    assert calls == [2]
    fit(steps=4, evaluate=lambda state: {"g": 1.0}, checkpoints=checkpoints("eval_g"), **options)
    assert calls == [2, 4]


@pytest.mark.parametrize("value", [None, "0.5", [0.5, 0.25], {"a": 0.5}, 1j])
def test_a_metric_that_is_no_number_is_refused(value):
    history = History([{"step": 1, "eval_f1": value}])
    with pytest.raises(OptionError, match=r"patience: 'eval_f1' is .*; needs one number"):
        ft.patience("eval_f1", mode="max")(history)
    with pytest.raises(OptionError, match=r"plateau: 'eval_f1' is .*; needs one number"):
        plateau("eval_f1", "max")(None, history)


@pytest.mark.parametrize(
    "choose",
    [
        lambda name, mode: ft.Checkpoints("unused", every=1, best=name, mode=mode),
        lambda name, mode: ft.patience(name, mode=mode),
        plateau,
    ],
    ids=["best", "patience", "plateau"],
)
def test_a_direction_that_contradicts_the_name_of_the_metric_is_warned_of(choose, recwarn):
    for name, mode in (("eval_accuracy", "max"), ("eval_loss", "min"), ("eval_map_loss", "min"), ("eval_fid", "min")):
        choose(name, mode)
    # Names that say nothing clear about the direction.
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
    """The loss falls, so that its largest value is that of the first checkpoint."""
    with pytest.warns(UserWarning, match="more of 'loss' counts as better"):
        checkpoints = ft.Checkpoints(tmp_path, every=2, best="loss", mode="max")
    fit(steps=6, checkpoints=checkpoints)
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
    message = rf"every={evaluate_every} is not a multiple of Checkpoints\(every={every}\)"
    with pytest.warns(UserWarning, match=message) if warned else nullcontext() as caught:
        fit(
            evaluate=lambda state: {"score": float(state.step)},
            evaluate_every=evaluate_every,
            checkpoints=ft.Checkpoints(tmp_path, every=every, best=best),
        )
    if warned:
        # It points at the call of `ft.fit`, which is in this file.
        assert [warning.filename for warning in caught] == [__file__]
