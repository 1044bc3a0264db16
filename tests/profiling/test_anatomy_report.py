"""Anatomy: its table, its dict and its picture."""

import json
import sys

import pytest

import ftrain as ft
from ftrain.errors import FtrainError, OptionError
from ftrain.step.flops import GROUPS
from tests.profiling import problem


@pytest.fixture(scope="module")
def problem_in_bf16():
    step, batch = problem.make(ft.with_amp("bf16"), width=64), problem.batch(1024, 64)
    return step, step.init(), batch


@pytest.fixture(scope="module")
def measured(problem_in_bf16):
    return ft.anatomy(*problem_in_bf16)


@pytest.fixture(scope="module")
def predicted(problem_in_bf16):
    return ft.anatomy(*problem_in_bf16, measure=False)


def test_the_table_has_the_memory_and_if_measured_the_times(measured, predicted):
    text = repr(measured)
    for expected in (
        "MiB at the peak, predicted;",
        "measured (",
        "  copies in another dtype",
        "    1  ",
        "bytes per parameter:",
        "FLOP/step",
        "  tensor contractions",
    ):
        assert expected in text
    assert text.count(" ms ") == len(GROUPS)
    assert "The times are of" not in text
    assert f"measured beyond that {measured.overhead / 2**20:>18,.1f} MiB  what the framework" in text
    assert " ms " not in repr(predicted)
    assert "beyond" not in repr(predicted)


def test_the_dict_has_the_numbers_of_the_table_and_is_json(measured, predicted):
    numbers = json.loads(json.dumps(measured.as_dict()))
    assert (numbers["peak"], numbers["measured"]) == (measured.peak, measured.measured)
    assert numbers["overhead"] == measured.measured - measured.peak
    assert sum(numbers["at_peak"].values()) == measured.peak
    assert numbers["seconds"].keys() == numbers["flops"].keys()
    assert predicted.as_dict()["measured"] is predicted.as_dict()["seconds"] is None


def test_the_picture_is_written_as_png_or_svg(measured, tmp_path):
    for name in ("a.png", "a.svg"):
        measured.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(OptionError, match=r"plot: path is .*a\.pdf'; it must end in \.png or \.svg"):
        measured.plot(tmp_path / "a.pdf")


def test_the_picture_needs_matplotlib(predicted, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FtrainError, match="plot: needs matplotlib"):
        predicted.plot()
