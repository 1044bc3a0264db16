"""A result is a row: question, variant, metric, unit, three quantiles, and where it was measured."""

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

TIME, RATIO, ADDED, MEMORY, WITHIN, MISSING, FAILED, SKIPPED = (
    "step time",
    "ratio to ",
    "added to ",
    "peak memory",
    "memory within a step",
    "missing",
    "failed",
    "not run",
)


@dataclass(frozen=True)
class Row:
    """One line of `bench/results/*.csv`; `low` and `high` bound the median with 95% where rounds were paired."""

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


def measured(
    question: str, variant: str, metric: str, unit: str, values: Sequence[float], *, sure: bool = False, note: str = ""
) -> Row:
    """Sum up measurements in a row, with the interval of the median when `sure` asks for it."""
    bounds = bootstrap(values)._asdict() if sure else {}
    return Row(question, variant, metric, unit, **spread(values)._asdict(), **bounds, note=note)


def said(question: str, variant: str, metric: str, note: str) -> Row:
    """A row without a number: missing, failed or not run, and why."""
    return Row(question, variant, metric, "", note=" ".join(note.split())[:300])


def placed(rows: Iterable[Row], device: str) -> list[Row]:
    """Add to rows where they were measured: device, torch and commit."""
    where = {"device": device, "torch": torch.__version__, "commit": commit()}
    return [dataclasses.replace(row, **where) for row in rows]


def commit() -> str:
    """The commit of the checkout, with a plus when tracked files of the package or the bench differ from it."""
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
    """Name the machine as precisely as a figure needs: processor and threads, or the accelerator."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} x{torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = dict(reversed([part.strip() for part in line.split(":", 1)]) for line in text.splitlines() if ":" in line)
    fields = {key: name for name, key in names.items()}
    name = fields.get("model name") or platform.machine()
    # Virtual machines hide the name of the processor; family and model still tell the generation.
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def write(rows: Sequence[Row], path: Path) -> None:
    """Write rows to a CSV file; those that it has of other questions, which only a full run asks, stay."""
    asked = {row.question for row in rows}
    rows = [*rows, *(row for row in (_read(path) if path.exists() else []) if row.question not in asked)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in dataclasses.asdict(row).items()} for row in rows)


def read(folder: Path) -> list[Row]:
    """Read every CSV file of a folder back into rows, by name of the file."""
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
