"""How often each fault is tried, and the file that holds what came of it.

`FTRAIN_FAULTS=full` tries as often as the file is meant to say, and writes it; otherwise a few tries are enough.
"""

import os
from pathlib import Path

import torch

from bench.rows import machine, measured, placed, read, write

FULL = os.environ.get("FTRAIN_FAULTS") == "full"
QUESTION = "faults"
FILE = Path(__file__).parents[2] / "bench" / "results" / "faults.csv"


def times(full, quick):
    """How often to try a fault."""
    return full if FULL else quick


def record(variant, *, note="", file=None, unit="count", **figures):
    """Write figures of a fault, such as ``runs=100, failures=0, silent=0``, when all of the tries were made.

    Rows of the same variant and metric are replaced, all others stay.
    """
    if not FULL and file is None:
        return
    file = file or FILE
    before = [row for row in read(file.parent) if row.question == QUESTION]
    made = [
        measured(QUESTION, variant, name.replace("_", " "), unit, [float(value)], note=note)
        for name, value in figures.items()
    ]
    rows = {(row.variant, row.metric): row for row in [*before, *placed(made, machine(torch.device("cpu")))]}
    write([rows[key] for key in sorted(rows)], file)
