"""Plots of the rows as SVG, if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import registry
from bench.claims import times
from bench.rows import RATIO, Row

NOT_PLOTTED = ("C8 ",)
"""The case of the optimizers has many questions with few entrants each, which its tables show as well."""
OURS, HAND, OTHER = "#c0392b", "#34495e", "#95a5a6"
COMPILED = registry.OURS_COMPILED.name


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw step times and ratios of every question with more than two entrants, and return the files.

    Returns nothing if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    # A fixed salt for the ids in the SVG: the same rows give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "bench", "font.size": 9, "figure.constrained_layout.use": True})
    from matplotlib import pyplot

    files = []
    for question in dict.fromkeys(row.question for row in rows):
        bars = times(rows, question)
        if len(bars) < 3 or question.startswith(NOT_PLOTTED):
            continue
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.8 + 0.3 * len(bars)), sharey=False)
        _times(axes[0], bars)
        _ratios(axes[1], [r for r in rows if r.question == question and r.variant == COMPILED])
        figure.suptitle(f"{question} ({bars[0].device})")
        path = folder / f"{_file_name(question)}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        files.append(path)
    return files


def _times(axis: Any, bars: Sequence[Row]) -> None:
    positions = range(len(bars))
    axis.barh(positions, [row.median for row in bars], color=[_colour(row.variant) for row in bars])
    axis.hlines(positions, [row.p20 for row in bars], [row.p80 for row in bars], color="black")
    axis.set_yticks(positions, [row.variant for row in bars])
    axis.invert_yaxis()
    axis.set_xlabel("microseconds a step: median, 20% to 80%")


def _ratios(axis: Any, rows: Sequence[Row]) -> None:
    ratios = sorted((r for r in rows if r.metric.startswith(RATIO)), key=lambda row: row.median)
    positions = range(len(ratios))
    axis.hlines(positions, [row.low for row in ratios], [row.high for row in ratios], color=OURS)
    axis.plot([row.median for row in ratios], positions, "o", color=OURS, markersize=4)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(positions, [row.metric.removeprefix(RATIO) for row in ratios])
    axis.set_xlabel("compiled ftrain / other, 95% interval")


def _colour(name: str) -> str:
    if name.startswith("ft"):
        return OURS
    return HAND if name.startswith("loop") else OTHER


def _file_name(question: str) -> str:
    """Return a name for the plot of a question: lower-case letters, digits and hyphens."""
    return "".join(letter if letter.isalnum() else "-" for letter in question.lower()).strip("-")
