"""Rows, the results of the bench, and the CSV files that hold them."""

from __future__ import annotations

import csv
import dataclasses
import math
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.stats import bootstrap, spread

# Metrics; the name of an entrant follows a prefix.
TIME = "step time"
RATIO = "ratio to "
ADDED = "added to "
MEMORY = "peak memory"
WITHIN = "memory within a step"
# Metrics of rows without a number.
MISSING = "missing"
FAILED = "failed"
SKIPPED = "not run"


@dataclass(frozen=True)
class Row:
    """One line of `bench/results/*.csv`.

    Args:
        question: what was compared, such as ``C2 GPT 4x128``.
        variant: the name of the entrant.
        metric: what was measured.
        unit: its unit; empty for a ratio.
        p20: the 20th percentile.
        median: the median.
        p80: the 80th percentile.
        low: lower end of the 95% confidence interval of the median, where it was computed.
        high: its upper end.
        device: the machine or accelerator.
        torch: the version of torch.
        commit: the commit of ftrain.
        note: a remark, or the reason why there is no number.
        rounds: how many measurements the figures are of; empty in rows of older versions.
    """

    question: str
    variant: str
    metric: str
    unit: str
    p20: float = math.nan
    median: float = math.nan
    p80: float = math.nan
    low: float = math.nan
    high: float = math.nan
    device: str = ""
    torch: str = ""
    commit: str = ""
    note: str = ""
    rounds: str = ""


def measured(
    question: str,
    variant: str,
    metric: str,
    unit: str,
    values: Sequence[float],
    *,
    interval: bool = False,
    note: str = "",
) -> Row:
    """Return the row of a list of measurements; with `interval`, also the confidence interval of their median."""
    bounds = bootstrap(values)._asdict() if interval else {}
    figures = {**spread(values)._asdict(), **bounds}
    return Row(question, variant, metric, unit, **figures, rounds=str(len(values)), note=note)


def unmeasured(question: str, variant: str, metric: str, note: str) -> Row:
    """Return a row without a number; its metric is `MISSING`, `FAILED` or `SKIPPED`, and `note` says why."""
    return Row(question, variant, metric, "", note=" ".join(note.split())[:300])


def with_origin(rows: Iterable[Row], device: str) -> list[Row]:
    """Return the rows with the device, the version of torch and the commit."""
    origin = {"device": device, "torch": torch.__version__, "commit": commit()}
    return [dataclasses.replace(row, **origin) for row in rows]


def commit() -> str:
    """Return the commit of this checkout, with a plus if files of `ftrain` or `bench` differ from it."""
    root = Path(__file__).parents[1]

    def git(*command: str) -> str:
        try:
            return subprocess.run(
                ["git", *command], cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "ftrain", "bench/*.py", "bench/**/*.py")
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{commit}+" if changed else commit


def machine(device: torch.device) -> str:
    """Return the name of the processor and the number of threads, or the name of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} x{torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields[key.strip()] = value.strip()
    name = fields.get("model name") or platform.machine()
    # Virtual machines often hide the name of the processor; family and model still identify its generation.
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def write(rows: Sequence[Row], path: Path) -> None:
    """Write rows to a CSV file. Its rows of other questions stay, since only a full run measures some of them."""
    replaced = {row.question for row in rows}
    old_rows = _read(path) if path.exists() else []
    rows = [*rows, *(row for row in old_rows if row.question not in replaced)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in dataclasses.asdict(row).items()} for row in rows)


def read(folder: Path) -> list[Row]:
    """Return the rows of all CSV files of a folder, sorted by file name."""
    return [row for path in sorted(folder.glob("*.csv")) for row in _read(path)]


def _read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**{name: _value(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]


def _text(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if math.isnan(value) else f"{value:.6g}"


def _value(name: str, text: str) -> str | float:
    if name not in {"p20", "median", "p80", "low", "high"}:
        return text
    return float(text) if text else math.nan
