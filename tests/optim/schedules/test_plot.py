"""Plots of schedules: files, titles, legends, axes and errors."""

import builtins
import math
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ftrain as ft
from ftrain.errors import FtrainError, OptionError
from ftrain.optim import schedules

SCHEDULE = schedules.warmup_cosine(3e-4, 10, 100)
PNG = b"\x89PNG\r\n\x1a\n"


def lines(figure) -> dict[str, tuple[list[float], list[float]]]:
    """Return label -> the x and y values of each line."""
    (axes,) = figure.axes
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


@pytest.mark.parametrize(("suffix", "path_type"), [(".png", str), (".SVG", Path)])
def test_the_same_plot_writes_the_same_bytes_without_a_date(tmp_path: Path, suffix: str, path_type: type) -> None:
    files = [tmp_path / f"{i}{suffix}" for i in range(2)]
    for file in files:
        schedules.plot({"a": SCHEDULE, "b": 0.1}, 120, path_type(file), log=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not re.search(rb"20\d\d-\d\d-\d\d", files[0].read_bytes())
    if suffix == ".png":
        assert files[0].read_bytes().startswith(PNG)
    else:
        assert ElementTree.parse(files[0]).getroot().tag.endswith("svg")


def test_the_title_is_the_text_of_one_schedule() -> None:
    figure = schedules.plot(SCHEDULE, 50)
    (axes,) = figure.axes
    assert axes.get_title() == repr(SCHEDULE)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer step", "value")
    assert not figure.legends
    assert axes.get_xlim() == (0, 50)
    assert lines(figure) == {repr(SCHEDULE): (list(range(51)), [SCHEDULE(k) for k in range(51)])}
    assert schedules.plot(SCHEDULE, 50, title="Mine").axes[0].get_title() == "Mine"


def test_several_schedules_have_a_legend() -> None:
    optimizer = ft.optim.sgd(SCHEDULE)
    figure = schedules.plot({**optimizer.schedules, "other": lambda step: step / 10}, 20)
    assert list(lines(figure)) == [*optimizer.schedules, "other"]
    assert lines(figure)["other"][1] == [k / 10 for k in range(21)]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*optimizer.schedules, "other"]


def test_a_logarithmic_axis_and_no_global_state(tmp_path: Path) -> None:
    import matplotlib

    before, loaded = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    figure = schedules.plot(SCHEDULE, 10, tmp_path / "a.svg", log=True)
    assert figure.axes[0].get_yscale() == "log"
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedules": None}, "schedules is None, needs a finite number, or a function"),
        ({"schedules": math.nan}, "schedules is nan, needs a finite number, or a function"),
        ({"schedules": {"lr": "cosine"}}, r"schedules\['lr'\] is 'cosine', needs a finite number, or a function"),
        ({"steps": 0}, "steps is 0, needs a whole number of at least 1"),
        ({"steps": 1.5}, "steps is 1.5, needs a whole number of at least 1"),
        ({"path": "schedule.jpg"}, "path is '.*schedule.jpg'; it must end in .png or .svg"),
        ({"path": "schedule"}, "path is '.*schedule'; it must end in .png or .svg"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=f"^plot: {message}"):
        schedules.plot(**{"schedules": SCHEDULE, "steps": 10, **arguments})  # type: ignore[arg-type]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = builtins.__import__

    def without_matplotlib(name: str, *arguments: object, **options: object) -> object:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return import_module(name, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(FtrainError, match=r"^plot: needs matplotlib, .* pip install 'matplotlib>=3\.8'$"):
        schedules.plot(SCHEDULE, 10)
