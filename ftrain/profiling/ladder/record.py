"""What a ladder found: a row for each technique, as numbers, a table and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING, Any

from ftrain.profiling.hints import Hint
from ftrain.profiling.ladder.drawing import draw
from ftrain.profiling.timing import Interval, Loading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 100
ALONE, FASTER, SMALLER = "alone", "stacked for speed", "stacked for memory"
COLUMNS = "{:<22} {:<25}{:>7} {:<12}{:>8}{:>6}{:>8}{:>5}{:>5}"
LEAST_ROUNDS = 6
"""Of fewer, not even all hold the median 95 times in 100."""

EMULATED = "emulated: the device converts that dtype to float32 and back, which is slower than float32 by itself."
UNITS = (2**30, "GiB"), (2**20, "MiB")


@dataclass(frozen=True)
class Row:
    """A technique, and what it brings.

    Args:
        group: `ALONE`, or in which stack, where a row has what the rows above it have.
        method: what the guides call it; empty for the step as given.
        name: how it is written.
        examples: in a batch.
        seconds: of a step, the median round with its interval; None where it did not run.
        speed: examples a second, relative to the step as given in the same round; None where it did not run.
        at_rest: bytes of its state and its batch; None where it did not run.
        predicted: bytes at the peak, predicted; None where that was not possible.
        measured: bytes at the peak, measured.
        bytes_a_parameter: of weights, their copies, optimizer state and gradients.
        rates: what was asked for beside examples, a second.
        note: why there are no numbers, or what it has taken the place of.
        emulated: whether the device converts the narrow dtype of its products to float32 and back.
    """

    group: str
    method: str
    name: str
    examples: int
    seconds: Interval | None = None
    speed: Interval | None = None
    at_rest: int | None = None
    predicted: int | None = None
    measured: int | None = None
    bytes_a_parameter: float | None = None
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    emulated: bool = False

    @property
    def peak(self) -> int | None:
        """Bytes at the peak, measured if they were."""
        return self.measured if self.measured is not None else self.predicted

    @property
    def rate(self) -> float | None:
        """Examples a second."""
        return self.examples / self.seconds.median if self.seconds else None


@dataclass(frozen=True)
class Ladder:
    """What `ftrain.ladder` measured; `print` shows it.

    Args:
        title: of what, and where.
        rows: the step as given first, then each technique alone, then stacked.
        rounds: how often each was timed.
        loading: seconds of the data, where there was any.
        hints: what costs speed.
    """

    title: str
    rows: Sequence[Row]
    rounds: int
    loading: Loading | None = None
    hints: Sequence[Hint] = ()

    def __getitem__(self, name: str) -> Row:
        """Return the row of a technique alone, by how it is written."""
        return {row.name: row for row in reversed(self.rows) if row.group == ALONE}[name]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as lists, dicts, text and numbers, such as JSON can hold."""
        rows = [{**dataclasses.asdict(row), "peak": row.peak, "rate": row.rate} for row in self.rows]
        for row in rows:
            row |= {key: row[key] and row[key]._asdict() for key in ("seconds", "speed")}
        loading = self.loading and {**self.loading._asdict(), "waiting": self.loading.waiting}
        hints = [hint._asdict() for hint in self.hints]
        return {"title": self.title, "rounds": self.rounds, "rows": rows, "loading": loading, "hints": hints}

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Draw speed against memory, relative to the step as given, into a PNG or SVG if there is a path.

        Raises:
            OptionError: for a path that ends in something else.
            FtrainError: when matplotlib is not installed.
        """
        base = self.rows[0].peak or 1
        shown = [
            (row.name, row.group, row.speed.median, row.peak / base) for row in self.rows if row.speed and row.peak
        ]
        return draw(shown, path)

    def __repr__(self) -> str:
        rates = next(iter(self.rows[0].rates), "examples")
        base = self.rows[0].peak or 0
        unit, name = next((each for each in UNITS if base >= each[0]), UNITS[-1])
        head = f"{'method':<22} {'technique':<25}{'ms a step':>9}{f'{rates}/s':>19}{name:>14}{'B/par':>10}"
        lines = [self.title, "", head]
        for group, rows in groupby(self.rows, lambda row: row.group):
            if group != ALONE:
                lines.append(group)
            last_method = None
            for row in rows:
                lines.append(_shown(row, "" if row.method == last_method else row.method, base, unit))
                last_method = row.method
        if self.loading is not None:
            lines.append(_loaded(self.loading))
        lines += ["", *_legend(self.rounds)]
        if any(row.emulated for row in self.rows):
            lines.append(EMULATED)
        lines += dict.fromkeys(f"  {row.name} is {row.note}" for row in self.rows if row.seconds and row.note)
        return "\n".join([*lines, *(f"  {hint}" for hint in self.hints)])


def _legend(rounds: int) -> list[str]:
    count = "1 round" if rounds == 1 else f"{rounds} rounds"
    interval = "that holds it 95 times in 100" if rounds >= LEAST_ROUNDS else "of all"
    return [
        f"Of {count} the median, and the range {interval}; ~ is predicted.",
        "x and % are of the step as given; B/par: bytes a parameter (weights, optimizer state, gradients).",
    ]


def _shown(row: Row, method: str, base: int, unit: int) -> str:
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
        f"{rate:,.{0 if rate >= 100 else 1}f}",
        f"x{row.speed.median:.2f}" if row.speed else "",
        peak,
        f"{row.peak / base:.0%}" if row.peak and base else "",
        "" if row.bytes_a_parameter is None else f"{row.bytes_a_parameter:.3g}",
    ).rstrip()


def _loaded(loading: Loading) -> str:
    text = f"{loading.alone * 1e3:.3g} ms a batch; the device waits {loading.waiting:.0%} of the time"
    return f"{'data preloading':<22} {'data as given':<25} {text}"
