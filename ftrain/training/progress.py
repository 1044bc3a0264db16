"""The progress display of `fit`: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ftrain.transforms.amp.overflow_counts import is_share

HIDDEN_METRICS = frozenset({"step", "seconds", "lr", "skipped", "grad_norm", "loss_scale"})
MAX_METRICS = 3
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_BARS = 30.0, 0.1
GIB = 2**30


@dataclass(frozen=True)
class Status:
    """What the display shows.

    Args:
        step: steps done.
        total: steps in all; None when it is not known.
        seconds: since the start.
        seconds_left: None when it is not known.
        rates: items per second, by name.
        memory: peak memory of the device so far, in bytes.
        metrics: the newest values.
    """

    step: int
    total: int | None
    seconds: float
    seconds_left: float | None
    rates: Mapping[str, float]
    memory: int
    metrics: Mapping[str, Any]


def show(enabled: bool) -> Display:
    """Return a bar in a terminal if `rich` is installed, otherwise lines; or a display that shows nothing."""
    if not enabled:
        return Display()
    # A program without a console has no stderr; a stand-in for it may have no more than write and flush.
    is_terminal = getattr(sys.stderr, "isatty", lambda: False)()
    return Bar() if is_terminal and importlib.util.find_spec("rich") is not None else Lines()


class Display:
    """Shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def due(self, step: int, total: int | None, seconds: float) -> bool:
        """Return whether it is time for an update: to compute a status may take longer than a step."""
        return False

    def update(self, status: Status) -> None:
        """Show the status."""

    def say(self, text: str) -> None:
        """Show a line that stays."""


class Lines(Display):
    """Prints a line after each tenth of the steps, and at least every half a minute."""

    def __init__(self) -> None:
        self._shown_step, self._shown_seconds = 0, 0.0

    def due(self, step: int, total: int | None, seconds: float) -> bool:
        """Return whether the last line is old, or this is the last step."""
        every = max(1, (total or sys.maxsize) // 10)
        return (
            step - self._shown_step >= every or seconds - self._shown_seconds >= SECONDS_BETWEEN_LINES or step == total
        )

    def update(self, status: Status) -> None:
        """Print the status."""
        self._shown_step, self._shown_seconds = status.step, status.seconds
        self.say(f"step {status.step}{f'/{status.total}' if status.total else ''}  {describe(status)}")

    def say(self, text: str) -> None:
        """Print a line."""
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)  # noqa: T201


class Bar(Display):
    """Draws a bar with `rich`."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
        self._task = self._progress.add_task("", total=None, status="starting")
        self._shown_seconds = -SECONDS_BETWEEN_BARS

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def due(self, step: int, total: int | None, seconds: float) -> bool:
        """Return whether a tenth of a second has passed, or this is the last step."""
        return seconds - self._shown_seconds >= SECONDS_BETWEEN_BARS or step == total

    def update(self, status: Status) -> None:
        """Move the bar."""
        self._shown_seconds = status.seconds
        self._progress.update(self._task, completed=status.step, total=status.total, status=describe(status))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False)


def describe(status: Status) -> str:
    """Return the status as one line.

    >>> describe(Status(5, 10, 2.0, 2.0, {"tokens": 1234.5}, 2**30, {"loss": 0.5, "lr": 1e-3}))
    'loss 0.5000  1,234 tokens/s  0:00:02 left  1.0 GiB'
    """
    metrics = {name: value for name, value in status.metrics.items() if not (name in HIDDEN_METRICS or is_share(name))}
    shown = {name: value for name, value in metrics.items() if isinstance(value, float)}
    parts = [f"{name} {value:.4f}" for name, value in list(shown.items())[:MAX_METRICS]]
    parts += [f"{rate:,.0f} {name}/s" for name, rate in status.rates.items()]
    parts += [f"{timedelta(seconds=round(status.seconds_left))} left"] if status.seconds_left is not None else []
    return "  ".join([*parts, f"{status.memory / GIB:.1f} GiB"])


def describe_evaluation(step: int, values: Mapping[str, Any]) -> str:
    """Return the result of an evaluation as one line.

    >>> describe_evaluation(10, {"eval_loss": 0.5, "eval_count": 3})
    'step 10  eval_loss 0.5000  eval_count 3'
    """
    texts = [f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()]
    return f"step {step}  {'  '.join(texts)}"
