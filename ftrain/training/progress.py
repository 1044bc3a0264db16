"""Show the progress of `fit`: metrics and rates, as a bar in a terminal or as lines in a log file."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

from ftrain.errors import FtrainError, OptionError
from ftrain.transforms.amp.overflow_counts import is_share
from ftrain.types import PyTree

Count: TypeAlias = Callable[[PyTree], int]
"""``batch -> number of items in it``, such as tokens."""

HIDDEN_METRICS = frozenset({"step", "seconds", "lr", "skipped", "grad_norm", "loss_scale"})
MAX_METRICS = 3
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_BARS = 30.0, 0.1
DUMB = "dumb", "unknown"
"""Values of ``TERM`` for terminals that cannot move the cursor. There `rich` shows a bar only at its end."""
GIB = 2**30


def total_steps(steps: int | None, epochs: int | None, data: Any, step: int, epoch: int, batches: int) -> int | None:
    """Return the number of the last step of a run; None if it is not known.

    The run has made `step` steps and `epoch` epochs, and `batches` steps of the next epoch.
    """
    if epochs is None and steps is not None:
        return steps
    try:
        remaining = max((epochs or 1) - epoch, 0) * len(data) - batches
    except (TypeError, FtrainError):  # The data has no length.
        return steps
    last = step + max(remaining, 0)
    return last if steps is None else min(steps, last)


class Throughput:
    """Counts steps and items, and computes their rates; times are those of `time.perf_counter`.

    With `keeps_errors`, `add` does not raise the error of a function: `require_counted` does, where ranks share errors.
    """

    def __init__(self, start: float, counts: Mapping[str, Count], *, keeps_errors: bool = False) -> None:
        self._start, self._counts, self._keeps_errors = start, counts, keeps_errors
        self._steps, self._items = 0, dict.fromkeys(counts, 0.0)
        self._items_of_rank = dict.fromkeys(counts, 0.0)
        self._error: Exception | None = None

    def add(self, batch: PyTree) -> None:
        """Count one step and the items of its batch, for the rates after the next `total`.

        Raises an OptionError if a function does not return a number.
        """
        self._steps += 1
        try:
            self._count(batch)
        except Exception as error:
            if not self._keeps_errors:
                raise
            self._error = self._error or error

    def _count(self, batch: PyTree) -> None:
        for name, count in self._counts.items():
            items: Any = count(batch)
            try:
                self._items_of_rank[name] += items
            except TypeError:
                raise OptionError(f"fit: throughput[{name!r}] returned {items!r}; needs a number") from None

    def require_counted(self) -> None:
        """Raises the first error that was kept, of any class."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def total(self, sums: Callable[[list[float]], list[float]]) -> None:
        """Add the counts of this rank since the last call to those of the run; `sums` adds numbers up over ranks."""
        for name, count in zip(self._counts, sums([*self._items_of_rank.values()]), strict=True):
            self._items[name] += count
            self._items_of_rank[name] = 0.0

    def exclude(self, seconds: float) -> None:
        """Leave out seconds that were not spent on training."""
        self._start += seconds

    def rates(self, now: float) -> tuple[dict[str, float], float]:
        """Return the items per second by name and the seconds per step since the last call."""
        elapsed = max(now - self._start, 1e-9)
        per_second = {name: items / elapsed for name, items in self._items.items()}
        per_step = elapsed / max(self._steps, 1)
        self._start, self._steps, self._items = now, 0, dict.fromkeys(self._counts, 0.0)
        return per_second, per_step


def show(enabled: bool) -> Display:
    """Return a bar in a terminal if `rich` is installed, otherwise lines, which are not printed unless `enabled`."""
    is_terminal = _is_terminal(sys.stderr) and os.environ.get("TERM") not in DUMB
    if enabled and is_terminal and importlib.util.find_spec("rich") is not None:
        return Bar()
    return Display(enabled)


def _is_terminal(stream: Any) -> bool:
    # A program without a console has None as its stream; others may be closed, or have only `write` and `flush`.
    return not getattr(stream, "closed", False) and bool(getattr(stream, "isatty", lambda: False)())


class Display:
    """Prints a line after each tenth of the steps, and at least every half minute."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._shown_step, self._shown_seconds = 0, 0.0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def due(self, step: int, total: int | None, seconds: float) -> bool:
        """Whether to call `update`. To make its text may take longer than a step."""
        if not self._enabled:
            return False
        every = max(1, (total or sys.maxsize) // 10)
        return (
            step - self._shown_step >= every or seconds - self._shown_seconds >= SECONDS_BETWEEN_LINES or step == total
        )

    def update(self, step: int, total: int | None, seconds: float, text: str) -> None:
        """Show a text about a step, `seconds` after the start of the run, which has `total` steps if that is known."""
        self._shown_step, self._shown_seconds = step, seconds
        self.say(f"step {step}{f'/{total}' if total else ''}  {text}")

    def say(self, text: str) -> None:
        """Print a line. An error of stderr, such as a closed terminal, does not end the run."""
        if self._enabled and sys.stderr is not None:
            with suppress(OSError, ValueError):  # A broken pipe or a closed terminal, and a closed file.
                print(text, file=sys.stderr, flush=True)  # noqa: T201


class Bar(Display):
    """Draws a bar with `rich`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # No markup, because names of metrics may contain brackets and colons. A narrow terminal shortens first the bar
        # and then the end of the text, so the number of steps stays visible.
        columns = BarColumn(bar_width=24), TextColumn("{task.fields[status]}", markup=False)
        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        # `rich` prints the output of the program above the bar, unless that goes to a file.
        self._progress = Progress(*columns, console=console, redirect_stdout=_is_terminal(sys.stdout))
        self._task = self._progress.add_task("", total=None, status="starting")
        self._shown_seconds = -SECONDS_BETWEEN_BARS

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # As in `Display.say`.
            self._progress.stop()

    def due(self, step: int, total: int | None, seconds: float) -> bool:
        """Whether a tenth of a second has passed, or this is the last step."""
        return seconds - self._shown_seconds >= SECONDS_BETWEEN_BARS or step == total

    def update(self, step: int, total: int | None, seconds: float, text: str) -> None:
        """Move the bar."""
        self._shown_seconds = seconds
        self._progress.update(self._task, completed=step, total=total, status=f"{step}/{total or '?'}  {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        with suppress(OSError):
            self._progress.console.print(text)


def describe(metrics: Mapping[str, Any], rates: Mapping[str, float], seconds_left: float | None, memory: int) -> str:
    """Return metrics, items per second, the time left if it is known, and the peak memory (in bytes) as one line.

    >>> describe({"loss": 0.5, "lr": 1e-3}, {"tokens": 1234.5}, 2.0, 2**30)
    'loss 0.5000  1,234 tokens/s  0:00:02 left  1.0 GiB'
    """
    shown = [
        f"{name} {_number(value)}"
        for name, value in metrics.items()
        if isinstance(value, float) and not (name in HIDDEN_METRICS or is_share(name))
    ]
    counts = ((name, f"{rate:,.0f}" if rate >= 1 else f"{rate:.2g}") for name, rate in rates.items())
    parts = [*shown[:MAX_METRICS], *(f"{count} {name}/s" for name, count in counts)]
    # With steps=sys.maxsize the remaining time exceeds the range of timedelta.
    if seconds_left is not None and seconds_left < timedelta.max.total_seconds():
        parts.append(f"{timedelta(seconds=round(seconds_left))} left")
    return "  ".join([*parts, f"{memory / GIB:.1f} GiB"])


def describe_evaluation(step: int, values: Mapping[str, Any]) -> str:
    """Return the result of an evaluation as one line.

    >>> describe_evaluation(10, {"eval_loss": 0.5, "eval_count": 3})
    'step 10  eval_loss 0.5000  eval_count 3'
    """
    texts = (f"{name} {_number(value) if isinstance(value, float) else value}" for name, value in values.items())
    return f"step {step}  {'  '.join(texts)}"


def _number(value: float) -> str:
    """Return a number with four decimals, or in powers of ten where these would hide it or fill the line.

    >>> _number(0.5), _number(2e-6), _number(-3e9), _number(0.0)
    ('0.5000', '2.000e-06', '-3.000e+09', '0.0000')
    """
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 or not value else f"{value:.3e}"
