"""The result of `ladder`: a row for each technique, as numbers, a table and a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING, Any

from ftrain._plotting import as_file, blank, save
from ftrain.backends.format_bytes import unit_of
from ftrain.profiling.hints import Hint
from ftrain.profiling.timing import Interval, Loading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 100
ALONE, FASTER, SMALLER = "alone", "stacked for speed", "stacked for memory"
COLUMNS = "{:<22} {:<25}{:>7} {:<12}{:>8}{:>6}{:>8}{:>5}{:>5}"
LEAST_ROUNDS = 6
"""With fewer rounds, even the full range is narrower than the 95% confidence interval of the median."""

EMULATED = "emulated: the device converts that dtype to float32 and back, which is slower than float32."


@dataclass(frozen=True)
class Row:
    """A technique with its time and memory. A value is None if it is not known, or the technique did not run."""

    group: str
    """`ALONE`, or the name of a stack, in which each row has the techniques of the rows above it too."""
    method: str
    name: str
    examples: int
    """1 if the tensors of the batch do not agree on their number."""
    seconds: Interval | None = None
    """Time of a step, over the rounds."""
    speed: Interval | None = None
    """Examples per second, relative to the step as given in the same round."""
    at_rest: int | None = None
    """Bytes of state and batch."""
    predicted: int | None = None
    """Bytes at the peak; `measured` too."""
    measured: int | None = None
    bytes_per_parameter: float | None = None
    """Bytes of weights, their copies, optimizer state and gradients per trained parameter."""
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Name -> count per second, for each function of `throughput`."""
    note: str = ""
    """Why there are no numbers, or which wrapper was replaced."""
    emulated: bool = False
    """Whether the device emulates the narrow dtype of the step."""

    @property
    def peak(self) -> int | None:
        """Bytes at the peak: measured, or else predicted."""
        return self.measured if self.measured is not None else self.predicted

    @property
    def rate(self) -> float | None:
        """Examples per second."""
        return self.examples / self.seconds.median if self.seconds else None


@dataclass(frozen=True)
class Ladder:
    """The result of `ftrain.ladder`; `print` shows it as a table.

    The first row is the step as given, then come the techniques alone, then the stacks. Each was timed in `rounds`
    rounds. `loading` is None if there was no data.
    """

    title: str
    rows: Sequence[Row]
    rounds: int
    loading: Loading | None = None
    hints: Sequence[Hint] = ()

    def __getitem__(self, name: str) -> Row:
        """Return the row of a technique alone, by its name."""
        return {row.name: row for row in reversed(self.rows) if row.group == ALONE}[name]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as lists, dicts, strings and numbers, for JSON."""
        rows = [{**dataclasses.asdict(row), "peak": row.peak, "rate": row.rate} for row in self.rows]
        for row in rows:
            row |= {key: row[key] and row[key]._asdict() for key in ("seconds", "speed")}
        loading = self.loading and {**self.loading._asdict(), "waiting": self.loading.waiting}
        hints = [hint._asdict() for hint in self.hints]
        return {"title": self.title, "rounds": self.rounds, "rows": rows, "loading": loading, "hints": hints}

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot speed against memory, relative to the step as given.

        `path` is a PNG or SVG file to write. Raises an OptionError for another suffix, and an FtrainError without
        matplotlib.
        """
        file, figure = as_file(path), blank(9.0, 4.5)
        axes, base = figure.add_subplot(), self.rows[0].peak or 1
        colours = {group: f"C{number}" for number, group in enumerate((ALONE, FASTER, SMALLER))}
        points = [(row, row.speed.median, row.peak / base) for row in self.rows if row.speed and row.peak]
        for number, (row, speed, memory) in enumerate(points):
            colour = colours[row.group]
            axes.plot(speed, memory, "o", color=colour, label=f"{number}  {row.name}")
            offset = (4, 4)
            axes.annotate(str(number), (speed, memory), offset, textcoords="offset points", fontsize=8, color=colour)
        axes.axhline(1, color="black", linewidth=0.5, alpha=0.4)
        axes.axvline(1, color="black", linewidth=0.5, alpha=0.4)
        axes.set(xlabel="examples/s, relative to the step as given", ylabel="peak of memory, relative")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, handletextpad=0.2)
        return save(figure, file)

    def __repr__(self) -> str:
        rates = next(iter(self.rows[0].rates), "examples")
        base = self.rows[0].peak or 0
        unit, name = unit_of(base)
        head = f"{'method':<22} {'technique':<25}{'ms/step':>7}{f'{rates}/s':>21}{name:>14}{'B/par':>10}"
        lines = [self.title, "", head]
        for group, rows in groupby(self.rows, lambda row: row.group):
            if group != ALONE:
                lines.append(group)
            last_method = None
            for row in rows:
                lines.append(_line(row, "" if row.method == last_method else row.method, base, unit))
                last_method = row.method
        if self.loading is not None:
            waiting = f"the device waits {self.loading.waiting:.0%} of the time"
            times = f"{self.loading.alone * 1e3:.3g} ms/batch; {waiting}"
            lines.append(f"{'data preloading':<22} {'data as given':<25} {times}")
        lines += ["", *_legend(self.rounds)]
        if any(row.emulated for row in self.rows):
            lines.append(EMULATED)
        lines += dict.fromkeys(f"  {row.name} is {row.note}" for row in self.rows if row.seconds and row.note)
        return "\n".join([*lines, *(f"  {hint}" for hint in self.hints)])


def _legend(rounds: int) -> list[str]:
    count = "1 round" if rounds == 1 else f"{rounds} rounds"
    interval = "95% confidence interval" if rounds >= LEAST_ROUNDS else "full range"
    return [
        f"Median of {count} with its {interval}; ~ is predicted.",
        "x and % are relative to the step as given.",
        "B/par: bytes per parameter (weights, optimizer state, gradients).",
    ]


def _line(row: Row, method: str, base: int, unit: int) -> str:
    if row.seconds is None:
        note = " ".join(row.note.split())
        text = f"{method:<22} {row.name:<25} {note}"
        return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
    low, median, high = (value * 1e3 for value in row.seconds)
    digits = 2 if median < 10 else 1 if median < 100 else 0
    rate = next(iter(row.rates.values()), row.rate or 0.0)
    peak = "" if row.peak is None else f"{'~' if row.measured is None else ''}{row.peak / unit:,.1f}"
    return COLUMNS.format(
        method,
        f"{row.name} emulated" if row.emulated else row.name,
        f"{median:,.{digits}f}",
        f"[{low:.{digits}f}, {high:.{digits}f}]",
        f"{rate / 1e6:,.2f}M" if rate >= 1e6 else f"{rate:,.{0 if rate >= 100 else 1}f}",
        f"x{row.speed.median:.{2 if row.speed.median < 10 else 0}f}" if row.speed else "",
        peak,
        f"{row.peak / base:.0%}" if row.peak and base else "",
        "" if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.3g}",
    ).rstrip()
