"""The ladder: its speeds and throughputs, the table, the numbers and the picture."""

import dataclasses
import json
import sys

import pytest

import ftrain as ft
from ftrain.errors import DataError, FtrainError, OptionError
from ftrain.profiling.ladder.record import ALONE, SMALLER, Ladder, Row
from ftrain.profiling.timing import Interval
from tests.profiling.problem import batch, make

NAMES = ["accumulate(2)", "remat()", 'with_amp("tf32")', 'adamw(state_dtype="bf16")']


def test_speeds_compare_examples_per_second_within_each_round(timed_ladder):
    times = {"as given": [1.0, 2.0, 4.0], "batch x2": [1.0, 2.0, 2.0], "remat()": [2.0, 4.0, 8.0]}
    throughput = {"numbers": lambda batch: batch["x"].numel()}
    ladder = timed_ladder(make(), batch(), times, techniques=["batch x2", "remat()"], throughput=throughput)
    assert ladder["batch x2"].speed == (2.0, 2.0, 4.0)
    assert ladder["remat()"].speed == (0.5, 0.5, 0.5)
    assert ladder["batch x2"].rate == 128 / 2.0
    assert ladder["batch x2"].rates == {"numbers": 128 * 16 / 2.0}
    assert "numbers/s" in repr(ladder)


def test_a_throughput_may_be_a_tensor(timed_ladder):
    throughput = {"finite numbers": lambda batch: batch["x"].isfinite().sum()}
    ladder = timed_ladder(make(), batch(), techniques=[], throughput=throughput)
    assert json.loads(json.dumps(ladder.as_dict()))["rows"][0]["rates"] == {"finite numbers": 64 * 16}


def test_a_throughput_that_counts_no_number_is_refused_before_anything_is_measured():
    with pytest.raises(OptionError, match=r"^ladder: throughput\['tokens'\] returned None; needs a number"):
        ft.ladder(make(), make().init(), batch(), throughput={"tokens": lambda batch: None})
    for throughput in ({"tokens": 3}, len):
        with pytest.raises(OptionError, match=r"^ladder: throughput is .*; needs functions of a batch by name"):
            ft.ladder(make(), make().init(), batch(), throughput=throughput)


def test_the_ladder_times_the_data(timed_ladder):
    ladder = timed_ladder(make(), batch(), techniques=[], data=[batch()] * 3)
    assert ladder.loading.alone > 0
    assert "ms/batch; the device waits" in repr(ladder)
    with pytest.raises(DataError, match="data is list_iterator"):
        timed_ladder(make(), batch(), techniques=[], data=iter([batch()] * 3))


@pytest.fixture
def ladder(timed_ladder):
    return timed_ladder(make(ft.clip(1.0)), batch(), {"remat()": 2.0}, techniques=NAMES, data=[batch()] * 2)


def test_the_table_has_a_row_for_each_technique_and_short_lines(ladder):
    text = repr(ladder)
    assert [line for line in text.splitlines() if len(line) > 100] == []
    device = ft.backends.get("cpu").describe()
    assert text.splitlines()[0] == f"squares(Sequential), 2,144 parameters, 64 examples; {device}"
    for expected in ("gradient checkpointing remat()", "x0.50", "ms/step", "examples/s", "KiB", "B/par", SMALLER):
        assert expected in text
    assert "Median of 3 rounds with its full range" in text
    assert "95% confidence interval" in repr(dataclasses.replace(ladder, rounds=6))


def test_the_dict_has_the_rows_of_the_table_and_is_json(ladder):
    numbers = json.loads(json.dumps(ladder.as_dict()))
    assert [row["name"] for row in numbers["rows"]] == [row.name for row in ladder.rows]
    assert numbers["rows"][0]["seconds"] == {"low": 1.0, "median": 1.0, "high": 1.0}


def test_the_picture_is_written_as_png_or_svg(ladder, tmp_path):
    for name in ("a.png", "a.svg"):
        ladder.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(OptionError, match=r"plot: path is .*a\.pdf"):
        ladder.plot(tmp_path / "a.pdf")


def test_rates_of_millions_do_not_run_into_the_column_before():
    fast = Row(ALONE, "", "as given", 256, Interval(0.14e-3, 0.14e-3, 0.14e-3), rates={"examples": 1_872_912.0})
    assert "[0.14, 0.14]   1.87M" in repr(Ladder("a step", [fast], rounds=1))


def test_the_picture_needs_matplotlib(ladder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FtrainError, match="plot: needs matplotlib"):
        ladder.plot()
