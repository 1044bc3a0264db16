"""Figures of schedules, drawn by matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from textwrap import fill
from typing import TYPE_CHECKING

from ftrain._plotting import as_file, blank, save
from ftrain.optim.schedules.call import describe
from ftrain.optim.schedules.checks import count_from_1
from ftrain.optim.schedules.combine import schedule_of
from ftrain.types import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(
    schedules: float | Schedule | Mapping[str, float | Schedule],
    steps: int,
    path: str | PathLike[str] | None = None,
    *,
    log: bool = False,
    title: str | None = None,
) -> Figure:
    """Draw schedules over the steps 0 to `steps`, and write the figure to a PNG or SVG file if `path` is given.

    Args:
        schedules: a schedule, whose text is the title, or name -> schedule, such as the ``schedules`` of an optimizer.
        steps: the last step, at least 1.
        path: a file whose name ends in .png or .svg. Default: write nothing.
        log: draw values on a logarithmic axis, which leaves out those that are not positive.
        title: the title of the figure.

    Returns:
        matplotlib's figure, which is not registered with pyplot.

    Raises:
        OptionError: an argument is not as above.
        FtrainError: matplotlib is not installed.
    """
    steps = count_from_1("plot", "steps", steps)
    file = as_file(path)
    if isinstance(schedules, Mapping):
        curves = {name: schedule_of("plot", f"schedules[{name!r}]", value) for name, value in schedules.items()}
        title = title or ""
    else:
        schedule = schedule_of("plot", "schedules", schedules)
        curves = {describe(schedule): schedule}
        title = describe(schedule) if title is None else title
    figure = blank(7.0, 3.5)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot(range(steps + 1), [curve(step) for step in range(steps + 1)], label=name, linewidth=1.8)
    axes.set(xlabel="optimizer step", ylabel="value")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=True)
    axes.margins(x=0)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if log:
        axes.set_yscale("log", nonpositive="mask")
    if isinstance(schedules, Mapping):
        figure.legend(loc="outside right upper", frameon=False)
    axes.set_title(fill(title, width=80), fontsize="medium")
    return save(figure, file)
