"""The table that `precision_report` makes of the shares of watched steps, evaluations and runs."""

import pytest

import ftrain as ft
from ftrain.errors import OptionError
from ftrain.training import progress
from tests.faults.problem import failing
from tests.transforms.amp.watched_models import FaultyNet, build, make_batches


def test_an_evaluation_of_a_watched_loss_has_shares_without_those_of_gradients():
    step = build()
    means = ft.evaluate(ft.eval_step(step.loss), step.init(), make_batches(3))
    assert means["overflow/parts.1.2"] > 0.9
    assert means["underflow/parts.3.1"] == 1.0
    assert not any("grad" in name for name in means)
    assert ft.precision_report(means).rows[0].part == "parts.1.2"


def test_a_history_makes_a_table_with_the_first_step_of_an_overflow():
    step = build(model=FaultyNet(1.0, 1e-9))
    batches = make_batches(4)
    batches[2] = batches[2] * 1e5
    _, history = ft.fit(step, step.init(), batches, progress=False)
    report = ft.precision_report(history)
    assert isinstance(report, ft.PrecisionReport)
    assert report.rows[0].part == "parts.0"
    assert report.rows[0].first == 3
    assert report.rows[0].overflow == pytest.approx(history["overflow/parts.0"][2] / 4)
    header, first_row, *_, last_line = repr(report).splitlines()
    assert " ".join(header.split()) == "part overflow underflow grad overflow grad underflow first step"
    assert first_row.startswith("parts.0")
    assert "lose nothing" in last_line


def test_the_order_of_the_rows():
    report = ft.precision_report(
        [
            {"step": 1, "overflow/a": 0.0, "overflow/a.b": 0.0, "overflow/c": 0.0, "overflow/(model)": 0.0},
            {"step": 2, "overflow/a": 0.9, "overflow/a.b": 0.2, "overflow/c": 0.0, "overflow/(model)": 1.0},
            {"step": 3, "overflow/a": 0.9, "overflow/a.b": 0.2, "overflow/c": 0.8, "overflow/(model)": 1.0},
            {
                "step": 3,
                "underflow/d": 0.5,
                "grad_underflow/e": 0.75,
                "grad_overflow/f": 0.1,
                "underflow/g": float("nan"),
            },
        ]
    )
    innermost_by_step = ["a.b", "c"]
    containing_by_share = ["(model)", "a"]
    with_gradients_that_overflow = ["f"]
    by_underflow = ["e", "d", "g"]
    assert [row.part for row in report.rows] == [
        *innermost_by_step,
        *containing_by_share,
        *with_gradients_that_overflow,
        *by_underflow,
    ]
    # The share of a part without elements is NaN, and prints as none.
    assert report.rows[-1][1:] == (0.0, 0.0, 0.0, 0.0, None)


def test_a_small_share_does_not_print_as_zero():
    assert "<0.01%" in repr(ft.precision_report({"overflow/x": 1e-9}))


@pytest.mark.parametrize("metrics", [{}, [], {"loss": 1.0}, {"overflow": 1.0}])
def test_metrics_without_shares_are_refused(metrics):
    with failing(OptionError, "precision_report", "watch=True"):
        ft.precision_report(metrics)


@pytest.mark.parametrize("argument", [ft.fit, None, 5, "overflow/a", [None], [{"overflow/a": 1.0}, 3]])
def test_an_argument_that_is_no_metrics_is_refused(argument):
    with failing(OptionError, "precision_report", "needs the metrics of a step, or the history of ft.fit"):
        ft.precision_report(argument)


def test_the_progress_display_leaves_shares_out():
    metrics = {"loss": 1.0, "overflow/a": 0.5, "grad_underflow/b": 0.5}
    line = progress.describe(metrics, {}, 1.0, 0)
    assert "loss" in line
    assert "flow" not in line
