"""`python -m bench`: time every case, print a table, and write the rows to a CSV file."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import subprocess
from pathlib import Path

import torch

from bench.steps import CASES, variants
from bench.timing import Row, interleaved

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="turns that each variant takes")
    parser.add_argument("--seconds", type=float, default=0.05, help="about how long a turn lasts")
    parser.add_argument("--out", type=Path, default=RESULTS / "steps.csv", help="where the rows go")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, case in CASES.items():
        made = variants(case)
        (probe,) = interleaved(name, {"probe": made["loop, eager"]}, rounds=3, calls=3)
        calls = max(1, round(options.seconds * 1e6 / probe.median))
        rows += interleaved(name, made, rounds=options.rounds, calls=calls)
        _print(rows[-len(made) :])
        torch.compiler.reset()
    _write(rows, options.out)


def _print(rows: list[Row]) -> None:
    print(f"\n{rows[0].case}, microseconds a step ({torch.get_num_threads()} threads)")
    print(f"{'':<28}{'p20':>10}{'median':>10}{'p80':>10}{'ratio':>8}")
    for row in rows:
        print(f"{row.variant:<28}{row.p20:>10,.0f}{row.median:>10,.0f}{row.p80:>10,.0f}{row.ratio:>8.2f}")


def _write(rows: list[Row], path: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    context = {"unit": "us/step", "device": f"cpu x{torch.get_num_threads()}", "torch": torch.__version__}
    context["commit"] = commit.stdout.strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        fields = [*(field.name for field in dataclasses.fields(Row)), *context]
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows({**_rounded(dataclasses.asdict(row)), **context} for row in rows)
    print(f"\nwritten to {path}")


def _rounded(row: dict[str, object]) -> dict[str, object]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    main()
