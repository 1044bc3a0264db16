"""Plots of the rows as SVG, with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import field
from bench.claims import times
from bench.rows import RATIO, Row

UNDRAWN = ("C8 ",)
"""Many questions with few bars each, whose tables say as much."""
OURS, HAND, OTHER = "#c0392b", "#34495e", "#95a5a6"
COMPILED = field.OURS_COMPILED.name


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw step times and ratios of every question with more than two entrants; return the files.

    Without matplotlib there are none.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    # The same rows give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "bench", "font.size": 9, "figure.constrained_layout.use": True})
    from matplotlib import pyplot

    files = []
    for question in dict.fromkeys(row.question for row in rows):
        bars = times(rows, question)
        if len(bars) < 3 or question.startswith(UNDRAWN):
            continue
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.8 + 0.3 * len(bars)), sharey=False)
        _times(axes[0], bars)
        _ratios(axes[1], [r for r in rows if r.question == question and r.variant == COMPILED])
        figure.suptitle(f"{question} ({bars[0].device})")
        path = folder / f"{_file(question)}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        files.append(path)
    return files


def _times(axis: Any, bars: Sequence[Row]) -> None:
    places = range(len(bars))
    axis.barh(places, [row.median for row in bars], color=[_colour(row.variant) for row in bars])
    axis.hlines(places, [row.p20 for row in bars], [row.p80 for row in bars], color="black")
    axis.set_yticks(places, [row.variant for row in bars])
    axis.invert_yaxis()
    axis.set_xlabel("microseconds a step: median, 20% to 80%")


def _ratios(axis: Any, rows: Sequence[Row]) -> None:
    ratios = sorted((r for r in rows if r.metric.startswith(RATIO)), key=lambda row: row.median)
    places = range(len(ratios))
    axis.hlines(places, [row.low for row in ratios], [row.high for row in ratios], color=OURS)
    axis.plot([row.median for row in ratios], places, "o", color=OURS, markersize=4)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(places, [row.metric.removeprefix(RATIO) for row in ratios])
    axis.set_xlabel("compiled ftrain / other, 95% interval")


def _colour(name: str) -> str:
    return OURS if name.startswith("ft") else HAND if name.startswith("loop") else OTHER


def _file(question: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in question.lower()).strip("-")
